"""`lowtide doctor`, as a user runs it."""

import subprocess
import sys

import pytest
import torch

from lowtide.tools.doctor import linear_cross_entropy as of_loss
from lowtide.tools.doctor.attention import table
from lowtide.tools.doctor.cpu import cpu
from tests.support.commands import invoke as in_this_process
from tests.support.commands import said


def invoke(*arguments):
    return in_this_process("doctor", *arguments)


@pytest.mark.extended
def test_machine_and_table(plain_environment):
    done = subprocess.run(
        [sys.executable, "-m", "lowtide", "doctor"], capture_output=True, text=True, env=plain_environment
    )
    assert done.returncode == 0, done.stderr
    assert_machine_and_table(done.stdout)


def test_machine_and_table_of_this_process():
    done = invoke()
    assert done.exit_code == 0, done.output
    assert_machine_and_table(done.stdout)


def assert_machine_and_table(printed):
    assert torch.__version__ in printed
    assert "triton" in printed
    assert printed.startswith("linear_cross_entropy, 8,192 x 4,096 x 128,256, backend='auto'")
    names = ("bfloat16 on cpu", "bfloat16 units", "C++ compiler", "OMP_WAIT_POLICY", "lowtide", "K ≠ E")
    places = [printed.index(f"\n  {name} ") for name in names]
    assert places == sorted(places)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for row in table():
        assert " ".join(row) in lines


def test_loss_table_matches_calls(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = of_loss.table()
    assert [call for call, *_ in lines] == ["bfloat16 on cpu", "float16 on cpu", "float32 on cpu"]
    for (_, engine, kernels, _), dtype in zip(lines, (torch.bfloat16, torch.float16, torch.float32)):
        described = of_loss.AskedLossCall(*of_loss.USUAL, dtype=dtype).describe()
        assert engine == described["engine"]
        assert kernels == f"{described['kernels']}, products in {described['products in']}"


def test_cpu_units_compiler_and_threads(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    found = cpu()
    assert list(found) == [
        "bfloat16 units",
        "C++ compiler",
        "bfloat16 products",
        "threads",
        "OMP_WAIT_POLICY",
    ]
    assert (
        found["C++ compiler"]
        == "there is no C++ compiler (no-such-compiler); install g++, or name one in CXX"
    )
    assert found["OMP_WAIT_POLICY"].startswith("not set: threads that wait spin")
    assert found["OMP_WAIT_POLICY"].endswith("start Python with OMP_WAIT_POLICY=passive")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert cpu()["OMP_WAIT_POLICY"].startswith("active: threads that wait spin")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert cpu()["OMP_WAIT_POLICY"].startswith("passive: ")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert "one thread" in cpu()["OMP_WAIT_POLICY"]


def test_attention_call():
    done = invoke("attention", "--device", "cpu", "--bias", "1,H,M,N", "--heads", "2", "--queries", "64")
    assert done.exit_code == 0, done.output
    assert "torch" in done.output
    assert "lowtide takes every bias itself" in done.output
    assert "backend" in done.output
    assert "engine" not in done.output
    options = ("--mask", "causal", "--key-heads", "4", "--layout", "BHMK", "--dtype", "float16")
    done = invoke("attention", "--device", "cuda", *options)
    assert "sdpa" in done.output
    assert "H 16/4 K 64 float16 on cuda" in done.output
    done = invoke("attention", "--window", "128", "0", "--dropout", "0.1", "--softcap", "30", "--logsumexp")
    assert "it gives no logsumexp" in done.output


def test_loss_call():
    sizes = ("--tokens", "1000", "--features", "64", "--classes", "3000")
    done = invoke("linear-cross-entropy", "--device", "cpu", *sizes, "--workspace", "20MiB")
    assert done.exit_code == 0, done.output
    assert "20 MiB" in done.output
    assert "1000 a chunk, 1 chunk" in done.output
    assert "weight gradient" in done.output
    assert "weight gradient" not in invoke("linear-cross-entropy", *sizes, "--no-gradients").output
    more = ("--z-loss", "1e-4", "--logit-scale", "0.5", "--weight", "--row-weight")
    assert invoke("linear-cross-entropy", *sizes, *more).exit_code == 0


ON_A_CPU = ("--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("attention", "--device", "cpu", "--heads", "6", "--key-heads", "4"), 1, "must be a multiple"),
        (("attention", "--bias", "1,H,X"), 2, "must be sizes or"),
        (("attention", "--mask", "diagonal"), 2, "causal-from-bottom-right"),
        (("attention", "--device", "tpu"), 2, "'tpu' is not one of"),
        (("linear-cross-entropy", "--backend", "reference", "--softcap", "-1"), 1, "softcap must be"),
        (("attention", "--bias", "1,-1"), 2, "must be sizes or"),
        (("attention", "--queries", "9" * 23), 2, "2147483647"),
        (("attention", "--queries", "2147483647", "--batch", "2147483647"), 1, "not enough memory"),
        (("linear-cross-entropy", "--device", "cpu", "--workspace", "100KB"), 1, "workspace must hold"),
        (("linear-cross-entropy", *ON_A_CPU, "--log-probs", "--z-loss", "0.1"), 1, "leave them out"),
        (
            ("linear-cross-entropy", *ON_A_CPU, "--log-probs", "--label-smoothing", "1"),
            1,
            "has no such option",
        ),
        (("linear-cross-entropy", *ON_A_CPU, "--log-probs", "--reduction", "sum"), 1, "has no such option"),
    ],
)
def test_call_refused(arguments, code, message):
    done = invoke(*arguments)
    assert done.exit_code == code
    assert message in said(done)
