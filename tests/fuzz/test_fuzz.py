"""The fuzzer itself: a few seconds of each subject find nothing, and what is wrong is found."""

import re
import subprocess
import sys
import time

import pytest
import torch

from tests.fuzz import deferred_check
from tests.fuzz.compare import Finding as Wrong
from tests.fuzz.deferred_program import Line, Program
from tests.fuzz.pool import Finding, Pool
from tests.fuzz.subjects import SUBJECTS
from tests.fuzz.worker import run_case
from tests.support.extended import all_extended_but

CASES = 30
SEED = 20_000  # the seed of the first case

WRONG = """
import os, sys, time
import torch, lowtide
from tests.fuzz import worker
{change}
worker.main()
"""

SCALED = """
right = lowtide.linear_cross_entropy
def wrong(input, linear_weight, target, **options):
    weight = 1.01 * linear_weight - 0.01 * linear_weight.detach()
    return right(input, weight, target, **options)
lowtide.linear_cross_entropy = wrong
"""


@pytest.mark.parametrize("seed", range(SEED, SEED + CASES))
@pytest.mark.parametrize("subject", SUBJECTS)
def test_cases_on_cpu(subject, seed):
    outcome = run_case(subject, seed)
    assert outcome.finding is None, f"{outcome.description}: {outcome.finding}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("subject", SUBJECTS)
def test_cases_on_gpu(subject):
    for seed in range(SEED, SEED + CASES):
        outcome = run_case(subject, seed, "cuda")
        assert outcome.finding is None, f"{outcome.description}: {outcome.finding}"


@pytest.mark.parametrize("subject", SUBJECTS)
def test_seed_determines_case(subject):
    descriptions = [run_case(subject, seed).description for seed in (5, 6, 5)]
    assert descriptions[0] == descriptions[2] != descriptions[1]


def scaled(function, name, at):
    """`function`, whose gradient of one argument is 1 % too large."""

    def wrong(*args, **kwargs):
        args = list(args)
        tensor = kwargs.get(name) if name in kwargs else args[at]
        changed = 1.01 * tensor - 0.01 * tensor.detach()
        if name in kwargs:
            kwargs[name] = changed
        else:
            args[at] = changed
        return function(*args, **kwargs)

    return wrong


@pytest.mark.parametrize(
    ("subject", "owner", "function", "argument"),
    [
        ("loss", "lowtide", "linear_cross_entropy", ("linear_weight", 1)),
        ("positions", "lowtide", "linear_cross_entropy", ("input", 0)),
        ("log_probs", "lowtide", "linear_log_probs", ("linear_weight", 1)),
        ("attention", "lowtide", "memory_efficient_attention_with_lse", ("key", 1)),
        ("attention", "lowtide", "scaled_dot_product_attention", ("value", 2)),
        ("distillation", "tests.ops.distillation.helpers", "forward_kl", ("student_weight", 1)),
        ("chunked_loss", "tests.fuzz.chunked_loss", "chunked_loss", ("hidden", 2)),
        ("deferred", "lowtide.ops.linear_cross_entropy.dispatch", "cross_entropy", ("linear_bias", 3)),
    ],
)
def test_wrong_gradient_found(monkeypatch, subject, owner, function, argument):
    """One of 1.01 times its size; and the same seed shows it again, and without it nothing."""
    __import__(owner)
    module, seeds = sys.modules[owner], range(SEED, SEED + 200)
    right = getattr(module, function)
    monkeypatch.setattr(module, function, scaled(right, *argument))
    seed = next(seed for seed in seeds if "exceeds" in str((first := run_case(subject, seed)).finding))
    assert run_case(subject, seed)[:2] == first[:2]
    monkeypatch.setattr(module, function, right)
    assert run_case(subject, seed).finding is None


CANCELS = (
    "h = e(x)",
    "z = torch.split(head(h[0, 0]), 2)[-1]",
    "z = z - z.max(0, keepdim=True).values",
    "r = torch.stack([z.sum(-1), z.amax(-1)])",
)


@pytest.mark.filterwarnings("ignore::lowtide.deferred.RealLogitsWarning")
@pytest.mark.parametrize("seed", all_extended_but(range(8), range(20)))
def test_gradient_that_cancels(monkeypatch, seed):
    """Its truth is 0: the roundings of its terms are allowed, and nothing that is larger."""
    program = Program(seed, "f32", (1, 3, 2, 7), False, False, None, "", "", [Line(each) for each in CANCELS])
    deferred_check.check(program, "cpu")

    def evaluated(program, way, *rest):
        found = evaluate(program, way, *rest)
        if way.startswith("deferred"):
            found.gradients["head.weight"].add_(1e-5)
        return found

    evaluate = deferred_check.evaluate
    assert not evaluate(program, "exact", "cpu").gradients["head.weight"].any()
    monkeypatch.setattr(deferred_check, "evaluate", evaluated)
    with pytest.raises(Wrong, match=r"head\.weight: in float64 error"):
        deferred_check.check(program, "cpu")


def test_rounding_of_each_chunk(monkeypatch):
    """Each row is a chunk: 0.16 is the sum of -0.89, 0.04 and 1.01, which bfloat16 rounds.
    That is allowed, and nothing that is larger."""
    seed = 411_003_584
    outcome = run_case("chunked_loss", seed)
    assert "head=norm leading=(4,)" in outcome.description
    assert "dtype=bfloat16 mode=recompute chunk_size=1" in outcome.description
    assert outcome.finding is None
    subject = sys.modules["tests.fuzz.chunked_loss"]

    def wrong(loss_fn, head, hidden, *arguments, right=subject.chunked_loss, **options):
        with torch.no_grad():
            head.scale.register_hook(lambda gradient: 1.1 * gradient)
        return right(loss_fn, head, hidden, *arguments, **options)

    monkeypatch.setattr(subject, "chunked_loss", wrong)
    assert "head.scale: error" in run_case("chunked_loss", seed).finding


def pool_of(change, timeout=60.0, subjects=("loss",)):
    found: list[Finding] = []
    command = (sys.executable, "-c", WRONG.format(change=change))
    return Pool(subjects, "cpu", found.append, timeout=timeout, command=command), found


@pytest.mark.extended
def test_processes_report_findings():
    pool, found = pool_of(SCALED)
    pool.run(SEED, count=25)
    assert pool.cases == {"loss": 25}
    assert pool.found["loss"] == len(found) > 0
    assert all("exceeds" in each.text and "wants=" in each.description for each in found)
    assert any("linear_weight" in each.text for each in found)


@pytest.mark.extended
def test_crash_is_a_finding():
    pool, found = pool_of("lowtide.linear_cross_entropy = lambda *a, **k: os.abort()")
    pool.run(SEED, count=2)
    assert pool.cases == {"loss": 2}
    assert [each.seed for each in found] == [SEED, SEED + 1]
    assert all("SIGABRT" in each.text and "wants=" in each.description for each in found)


@pytest.mark.extended
def test_timeout_is_a_finding():
    pool, found = pool_of("lowtide.linear_cross_entropy = lambda *a, **k: time.sleep(600)", timeout=2.0)
    begin = time.monotonic()
    pool.run(SEED, count=1)
    assert "no answer after 2 s" in found[0].text
    assert time.monotonic() - begin < 100


def test_command_status_and_summary():
    """Its status is 0 without findings; and it says what it did."""
    command = [sys.executable, "-m", "tests.fuzz", "--seed", str(SEED), "--count", "2", "--workers", "1"]
    for subject in ("positions", "distillation"):
        command += ["--subject", subject]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seeds from {SEED}" in done.stdout
    assert re.search(r"positions +2 +0", done.stdout)
    assert re.search(r"all +4 +0", done.stdout)
