"""A call of distillation that is recorded has the bits of the call that was not."""

import pytest
import torch

from lowtide.core import torch_private
from lowtide.memory import peak_memory
from lowtide.ops.distillation import autograd, planner
from tests.ops.distillation.helpers import DIVERGENCES, REDUCTIONS, fused, make_inputs
from tests.support.extended import all_extended_but
from tests.support.loss import interpreted

pytest.importorskip("triton")
recorded = pytest.importorskip("lowtide.core.recording.recorded")
recordings = pytest.importorskip("tests.support.recordings")
like_calls = pytest.importorskip("lowtide.core.recording.like_calls")

BF16 = torch.bfloat16


@pytest.fixture
def runs(device, monkeypatch):
    """The recordings that ran; the second call of a kind is recorded."""
    if device == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")
    for module in (planner, autograd):  # on a CPU auto takes plain torch, also in the interpreter
        monkeypatch.setattr(module, "choose_backend", lambda *_: "triton")
    monkeypatch.setattr(recorded, "RECORDED_CALL", 2)
    monkeypatch.setattr(like_calls, "_recordings", {})
    return recordings.count_runs(monkeypatch)


def step(inputs, divergence, upstream=None, **options):
    loss = fused(inputs, divergence, **options)
    upstream = torch.ones_like(loss) if upstream is None else upstream
    gradients = torch.autograd.grad(loss, [*inputs.leaves().values()], upstream)
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("options", [{}, {"temperature": 2.0, "student_softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", all_extended_but([torch.float32], [torch.float32, BF16, torch.float16]))
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", all_extended_but(["forward", "js 0.5"], DIVERGENCES))
def test_same_bits(device, runs, divergence, reduction, dtype, options):
    inputs = make_inputs(9, 16, 40, 8, device=device, dtype=dtype, bias=bool(options))
    found = [step(inputs, divergence, reduction=reduction, **options) for _ in range(4)]
    assert len(runs) == (6 if reduction == "none" else 3)
    for results in found[1:]:
        assert all(map(torch.equal, results, found[0]))
        assert [each.stride() for each in results] == [each.stride() for each in found[0]]


@pytest.mark.parametrize("layout", ["plain", "expanded", "with gaps"])
def test_upstream_gradients_of_any_layout(device, runs, layout):
    inputs = make_inputs(9, 16, 40, 8, device=device)
    upstream = torch.randn(9, device=device)
    other = {
        "plain": upstream,
        "expanded": upstream[:1].expand(9),
        "with gaps": upstream.repeat_interleave(2)[::2],
    }[layout]
    expected = step(inputs, "reverse", other.contiguous(), reduction="none")
    for _ in range(3):
        assert all(map(torch.equal, step(inputs, "reverse", other, reduction="none"), expected))
    assert len(runs) == (6 if layout == "plain" else 5)  # the first upstream gradient was contiguous


def test_other_calls_between(device, runs):
    """Calls of other sizes, options and trained tensors have recordings of their own."""
    inputs, fewer, frozen = (make_inputs(N, 16, 40, 8, device=device) for N in (9, 7, 9))
    frozen.student_weight.requires_grad_(False)
    kinds = [(inputs, "js 0.5"), (fewer, "js 0.5"), (inputs, "js 0.1"), (frozen, "js 0.5")]
    first = [step(inputs, divergence) for inputs, divergence in kinds]
    for _ in range(3):
        for (inputs, divergence), expected in zip(kinds, first):
            assert all(map(torch.equal, step(inputs, divergence), expected))
    assert len(runs) == 3 * len(kinds)
    assert len({id(each) for each in runs}) == len(kinds)


def test_new_numbers_are_read(device, runs):
    inputs = make_inputs(9, 16, 40, 8, device=device)
    for _ in range(4):
        step(inputs, "forward")
    with torch.no_grad():
        inputs.student_input.mul_(0.5)
        inputs.teacher_weight.neg_()
    assert len(runs) == 3
    found = step(inputs, "forward")
    assert len(runs) == 4
    like_calls._recordings.clear()
    assert all(map(torch.equal, step(inputs, "forward"), found))


def test_lengths_that_come_once_drop_no_recording(device, runs, monkeypatch):
    """A size that repeats among them is recorded once, and stays so."""
    monkeypatch.setattr(recorded, "MOST", 4)
    inputs = make_inputs(9, 16, 40, 8, device=device)
    for length in range(10, 10 + 2 * recorded.MOST):
        step(inputs, "forward")
        step(make_inputs(length, 16, 40, 8, device=device), "forward")
    assert len(runs) == 2 * recorded.MOST - 1
    assert len({id(each) for each in runs}) == 1


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_same_peak(device, runs, monkeypatch, reduction):
    inputs = make_inputs(64, 16, 400, 8, device=device)
    monkeypatch.setattr(torch_private, "profiles", lambda: False)  # a profile measures the CPU's peak
    peaks = []
    for _ in range(3):
        with peak_memory(device) as peak:
            step(inputs, "js 0.5", reduction=reduction)
        peaks.append(peak.bytes)
    assert len(runs) == (4 if reduction == "none" else 2)
    assert max(peaks) <= peaks[0]
