"""Every entry point on a device other than the CPU or CUDA: plain torch, exact, bounded memory.

The device is simulated (tests/support/simulated_device.py): it has the dtypes and the operations of
mps, by torch's own list of kernels, and the CPU's numbers.
"""

import csv
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import lowtide
from lowtide.core.kernels.backend import reason_against
from lowtide.memory import peak_memory
from lowtide.tools.doctor import attention as of_attention
from lowtide.tools.doctor import linear_cross_entropy as of_loss
from lowtide.tools.doctor import selftest, selftest_cases
from tests.support.commands import invoke
from tests.support.loss import (
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    smallest_workspace,
)

simulated_device = pytest.importorskip("tests.support.simulated_device")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def device():
    return simulated_device.install()


def there(inputs, device):
    """The same on the device: leaves of their own."""
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    moved = {name: each.detach().to(device) for name, each in tensors.items() if each is not None}
    return replace(
        inputs, **{name: each.requires_grad_(tensors[name].requires_grad) for name, each in moved.items()}
    )


def here(result):
    return {name: each.cpu() for name, each in result.items()}


OPTIONS = [
    pytest.param({}, {}, id="plain"),
    pytest.param({"bias": True, "class_weight": True}, {"label_smoothing": 0.1, "z_loss": 1e-3}, id="terms"),
    pytest.param(
        {"logit_scale": True, "row_weight": True}, {"softcap": 3.0, "normalizer": 7.0}, id="factors"
    ),
    pytest.param({"probabilities": True}, {}, id="probabilities"),
]


@pytest.mark.parametrize("room", ["default", "least"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("tensors", "options"), OPTIONS)
def test_loss_and_gradients(device, tensors, options, reduction, dtype, room):
    if reduction != "mean":
        options = {name: each for name, each in options.items() if name != "normalizer"}
    # The least workspace has room for a row and a class at a time.
    inputs = make_inputs(dtype=dtype, **tensors, **({"N": 11, "V": 23} if room == "least" else {}))
    moved, options = there(inputs, device), {**options, "reduction": reduction}
    workspace = None
    if room == "least":
        workspace = smallest_workspace(lambda workspace: fused(moved, workspace=workspace, **options))
    found = here(differentiate(fused, moved, workspace=workspace, **options))
    check(found, inputs, **options)


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
def test_log_probs(device, dtype):
    inputs = make_inputs(dtype=dtype, bias=True)
    moved, upstream = there(inputs, device), [torch.randn(inputs.leading) for _ in range(3)]
    seeds = [each.to(device) for each in upstream]
    found = differentiate_log_probs(fused_log_probs, moved, seeds, softcap=3.0)
    check_log_probs(here(found), inputs, upstream, softcap=3.0)


# Calls as those of the self-test: a function and its definition in plain torch.


def passes(case, device):
    outcome = selftest._outcome(case, device)
    assert outcome.passed, outcome
    return outcome


def test_selftest_leaves_out_what_the_device_lacks(device):
    left_out = {*selftest.CASES} - {*selftest.cases_on(device)}
    assert {case.dtype for case in left_out} == {torch.float64}
    assert all(case in left_out for case in selftest.CASES if case.dtype == torch.float64)


@pytest.mark.parametrize(
    "case",
    [case for case in selftest.CASES if case.dtype != torch.float64],
    ids=lambda case: f"{case.name}, {case.dtype}",
)
def test_selftest(device, case):
    passes(case, device)


def _positions():
    target_NP = torch.randint(63, (37, 3))
    target_NP[::7] = -100
    return {"input": torch.randn(37, 19), "weight": torch.randn(63, 3, 19) / 4, "target": target_NP}


def _attended(given, p=0.0):
    return lowtide.memory_efficient_attention(given["query"], given["key"], given["value"], p=p)


def _penalty(loss, given):
    """The squares of a gradient, to be differentiated again."""
    (gradient,) = torch.autograd.grad(loss, [given["input"]], create_graph=True)
    return gradient.square().sum() * 1e3


CASES = {
    "K-dimensional": (
        _positions,
        lambda given: lowtide.linear_cross_entropy(given["input"], given["weight"], given["target"]),
        lambda given: F.cross_entropy(
            torch.einsum(
                "nd,vpd->nvp", selftest_cases._wide(given["input"]), selftest_cases._wide(given["weight"])
            ),
            given["target"],
        ),
    ),
    "twice differentiated": (
        selftest_cases._head,
        lambda given: _penalty(selftest_cases._loss(given), given),
        lambda given: _penalty(selftest_cases._plain_loss(given), given),
    ),
    "the reference": (
        selftest_cases._head,
        lambda given: selftest_cases._loss(given, backend="reference"),
        selftest_cases._plain_loss,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_further_calls(device, name):
    passes(selftest_cases.Case(name, F32, *CASES[name]), device)


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast(device, dtype):
    """Of the loss the products' operands stay float32, as on a CPU; attention has autocast's."""

    def ours(given):
        with torch.autocast(device, dtype):
            return selftest_cases._loss(given)

    def attended(given):
        with torch.autocast(device, dtype):
            return _attended(given)

    passes(
        selftest_cases.Case("autocast", F32, selftest_cases._head, ours, selftest_cases._plain_loss), device
    )
    query = torch.randn(1, 7, 2, 8, device="cpu").to(device)
    assert attended({"query": query, "key": query, "value": query}).dtype == dtype


def test_dropout_of_attention(device):
    """A seed hides the same scores everywhere; a drawn one follows from the device's generator."""
    given = {name: torch.randn(1, 40, 2, 8) for name in ("query", "key", "value")}
    moved = {name: each.to(device) for name, each in given.items()}
    for seed in (5, -(1 << 60)):
        on_cpu, on_device = (
            lowtide.memory_efficient_attention(*each.values(), p=0.5, seed=seed) for each in (given, moved)
        )
        torch.testing.assert_close(on_device.cpu(), on_cpu)
    drawn = []
    for _ in range(2):
        torch.manual_seed(1)
        drawn += [_attended(moved, p=0.5).cpu() for _ in range(2)]
    assert torch.equal(drawn[0], drawn[2])
    assert torch.equal(drawn[1], drawn[3])
    assert not torch.equal(drawn[0], drawn[1])


def test_chunked_loss_draws_the_same_twice(device):
    """The loss is linear in the hidden states: their products with its gradient are its value."""
    head = torch.nn.Linear(8, 5, bias=False).to(device)
    hidden = torch.randn(12, 8).to(device).requires_grad_()

    def loss_fn(logits):
        return (logits * torch.rand(logits.shape, device=device)).sum()

    loss = lowtide.chunked_loss(loss_fn, head, hidden, chunk_size=5, mode="recompute")
    loss.backward()
    torch.testing.assert_close((hidden * hidden.grad).sum().cpu(), loss.detach().cpu())


# Memory.


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("room", [1, 2])
def test_workspace_kept(device, dtype, reduction, room):
    N, D, V = 16, 4, 16384
    inputs = there(make_inputs(N, D, V, dtype=dtype, bias=True), device)
    options = {"reduction": reduction}
    workspace = room * smallest_workspace(lambda workspace: fused(inputs, workspace=workspace, **options))
    upstream = torch.ones(() if reduction != "none" else N).to(device)

    def step():
        fused(inputs, workspace=workspace, **options).backward(upstream)
        held = sum(leaf.grad.nbytes for leaf in inputs.leaves().values())
        for leaf in inputs.leaves().values():
            leaf.grad = None
        return held

    step()
    with peak_memory("cpu") as peak:
        held = step()
    assert peak.bytes <= workspace + held
    assert peak.largest < N * V * 4


# Errors, and messages of the doctor.


def test_kernels_are_refused(device):
    x = torch.randn(8, 16).to(device)
    with pytest.raises(ValueError, match=f"backend='triton' cannot run .* run on CUDA tensors, .* {device}"):
        lowtide.linear_cross_entropy(x, x, torch.arange(8).to(device), backend="triton")
    query = x.view(1, 8, 2, 8)
    for backend, reason in (("triton", "run on CUDA tensors"), ("sdpa", "are not known to be right on")):
        with pytest.raises(
            ValueError, match=f"backend='{backend}' cannot run this call: its kernels {reason}"
        ):
            lowtide.memory_efficient_attention(query, query, query, backend=backend)


def test_the_simulation_refuses_what_mps_lacks(device):
    x = torch.randn(2, 3).to(device)
    with pytest.raises(TypeError, match=r"mps has no torch\.float64"):
        x.double()
    with pytest.raises(NotImplementedError, match="frexp"):
        torch.frexp(x)
    with pytest.raises(NotImplementedError, match=r"mm\.dtype"):
        torch.mm(x.half(), x.half().t(), out_dtype=F32)


def test_old_macos_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: major < 15)
    assert "macOS 15" in reason_against(torch.device("mps"))
    assert reason_against(torch.device("xpu")) is None
    with pytest.raises(ValueError, match=r"input cannot be on mps:0: before macOS 15 .*; move it"):
        of_loss.AskedLossCall(8, 16, 32, device="mps").describe()


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_doctor_says_the_way(name):
    found = of_loss.AskedLossCall(*of_loss.USUAL, device=name).describe()
    assert (found["engine"], found["kernels"], found["products in"]) == (
        "logits_torch",
        "plain torch",
        "float32",
    )
    assert found["workspace"] == "64 MiB, the default"
    choice = of_attention.AskedAttentionCall(device=name).choice()
    assert choice.backend == "torch"
    assert f"not sdpa: its kernels are not known to be right on {name}" in choice.reason


@pytest.mark.parametrize("name", ["mps", "xpu"])
def test_selftest_without_the_device(name):
    if {"mps": torch.backends.mps, "xpu": torch.xpu}[name].is_available():
        pytest.skip("it is here")
    done = invoke("doctor", "--selftest", "--device", name)
    assert done.exit_code != 0
    assert f"--device {name}: torch sees no {name} device here" in done.output


def test_table_of_platforms_says_so():
    with (REPOSITORY / "docs" / "_data" / "platforms.csv").open(newline="") as file:
        rows = {row["call"]: row["status"] for row in csv.DictReader(file) if "(mps)" in row["platform"]}
    assert rows == {"every call": "checked on a simulated device, never on a real one"}
