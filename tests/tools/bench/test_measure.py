import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from lowtide.tools.bench import measure, timing, truth
from lowtide.tools.bench.cases import IGNORE_INDEX, LossCase, Mode, own_inputs, own_results
from lowtide.tools.bench.measure import floor, rows
from lowtide.tools.bench.providers import Provider, Unavailable
from lowtide.tools.bench.timing import alternate, quantiles
from lowtide.tools.bench.truth import exact, relative_error

MIB = 2**20
CASE = LossCase("tiny", 96, 16, 80, torch.float32, "cpu")


def dense(input_ND, weight_VD, target_N):
    return F.cross_entropy(F.linear(input_ND, weight_VD).float(), target_N)


def provider(loss_fn, name="fake"):
    return Provider(name, "torch", lambda case: loss_fn)


def run(loss_fn, mode=Mode.STEP, case=CASE):
    (row,) = rows(case, [provider(loss_fn)], mode)
    return row


def test_inputs_repeat_with_a_tenth_ignored():
    case = replace(CASE, ignored=0.1)
    one, other = case.inputs(requires_grad=True), case.inputs(requires_grad=False)
    assert all(torch.equal(a, b) for a, b in zip(one, other))
    assert one[0].requires_grad
    assert not other[0].requires_grad
    assert (one[2] == IGNORE_INDEX).sum() == 9
    logits = F.linear(*other[:2])
    assert 0.8 < logits.std() < 1.2


def test_each_rank_has_its_part():
    """Under FSDP2 each has as many targets that count: a mean of means is the mean of all."""
    case = LossCase("tiny", 20, 4, 7, torch.float32, "cpu", ignored=0.1, ranks=3, tokens_divided=True)
    ranks = [replace(case, rank=rank) for rank in range(3)]
    whole = case.inputs(requires_grad=True)
    assert [len(each) for each in whole] == [60, 7, 60]
    assert [(each == IGNORE_INDEX).sum() for each in whole[2].split(20)] == [2, 2, 2]
    own = [own_inputs(each, whole) for each in ranks]
    for place in (0, 2):
        assert torch.equal(torch.cat([each[place] for each in own]), whole[place])
    assert all(each[0].is_leaf and each[0].requires_grad and each[1] is whole[1] for each in own)
    loss, dx_ND, dw_VD = torch.tensor(1.5), torch.randn(60, 4), torch.randn(7, 4)
    parts = [own_results(each, (loss, dx_ND, dw_VD)) for each in ranks]
    assert all(each[0] is loss for each in parts)
    assert torch.equal(torch.cat([each[1] for each in parts]), 3 * dx_ND), "those of each rank's own mean"
    assert torch.equal(torch.cat([each[2] for each in parts]), dw_VD)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-14), (torch.bfloat16, 1e-6)])
def test_truth_matches_float64(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(truth, "TRUTH_CHUNK", 40)  # two whole chunks and a rest
    case = LossCase("tiny", 96, 16, 80, dtype, "cpu")
    input_ND, weight_VD, target_N = case.inputs(requires_grad=False)
    wide = [tensor.double().requires_grad_() for tensor in (input_ND, weight_VD)]
    loss = F.cross_entropy(F.linear(*wide), target_N)
    want = (loss.detach(), *torch.autograd.grad(loss, wide))
    got = exact(input_ND, weight_VD, target_N, Mode.STEP)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a.double(), b) < tolerance
    (forward,) = exact(input_ND, weight_VD, target_N, Mode.FORWARD)
    assert forward == got[0]


@pytest.mark.parametrize("chunk", [96, 40])
@pytest.mark.parametrize(("mode", "products"), [(Mode.STEP, 3), (Mode.FORWARD, 1)])
def test_floor_products_alone(mode, products, chunk, monkeypatch):
    monkeypatch.setattr(measure, "FLOOR_CHUNK", chunk)
    call = floor(*CASE.inputs(requires_grad=True), mode)
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == products * 2 * CASE.tokens * CASE.features * CASE.classes
    assert {str(name) for name in counter.get_flop_counts()["Global"]} == {"aten.mm"}


def test_host_time_of_each_call_is_its_own(monkeypatch):
    """The median over the rounds but the first, each of which begins with an idle card."""
    order, idle = [], []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: idle.append(len(order)))
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def call(name, seconds):
        def run():
            order.append(name)
            now[0] += next(seconds)

        return run

    quick, slow = (iter(each) for each in ((8e-6, 1e-6, 9e-6, 2e-6), (9e-6, 5e-6, 6e-6, 7e-6)))
    found = timing.host_microseconds((call("quick", quick), call("slow", slow)), 3, warm=1)
    assert found == pytest.approx([2, 6])
    assert order == ["quick", "slow"] * 4
    assert idle == [0, 2, 4, 6, 8]


def test_calls_alternate_in_another_order_each_round():
    order = []

    def call(name, seconds):
        def sleep():
            order.append(name)
            time.sleep(seconds)

        return sleep

    short, long = alternate((call("short", 0.001), call("long", 0.02)), 8, "cpu")
    by_round = list(zip(order[::2], order[1::2], strict=True))
    assert by_round[1::2] == [turns[::-1] for turns in by_round[::2]]
    assert len(set(by_round[::2])) == 2
    assert len(short) == len(long) == 8
    assert min(short) >= 1
    assert min(long) >= 20


def test_calls_alternate_by_groups():
    order = []
    calls = [
        partial(order.append, name) for name in ("forward", "backward", "other forward", "other backward")
    ]
    spans = alternate(calls, 4, "cpu", together=2)
    assert [len(own) for own in spans] == [4] * 4
    pairs = list(zip(order[::2], order[1::2], strict=True))
    assert set(pairs) == {("forward", "backward"), ("other forward", "other backward")}
    assert pairs[:2] == pairs[3:1:-1]


def test_quantiles():
    assert quantiles([4.0, 1.0, 3.0, 2.0, 5.0], 0.2, 0.5, 0.8) == pytest.approx([1.8, 3.0, 4.2])


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("beside", [None, provider(dense, "plain")])
def test_ratios_by_round(beside, losses, monkeypatch):
    """That of the medians would be 2.2, and over the plain call 0.1. What amounts to two losses
    takes half as long for one."""
    spans = [[1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [1.2, 5.0, 4.4]]

    def alternate(calls, rounds, device):
        return [[1.0]] * len(calls) if rounds == 1 else [spans[i] for i in (0, 1, 2) if i != 1 or beside]

    monkeypatch.setattr(measure, "alternate", alternate)
    timed = provider(dense)
    call = timed.call
    monkeypatch.setattr(type(timed), "call", lambda self, *given: call(*given)._replace(losses=losses))
    (row,) = rows(CASE, [timed], Mode.STEP, beside)
    figures = row.figures
    assert (figures.ms, figures.floor_ms) == (pytest.approx(4.4 / losses), 2.0)
    assert figures.ratio == pytest.approx(1.2 / losses)
    assert figures.over_plain == (pytest.approx(0.6 / losses - 1) if beside else None)


def test_figures_of_dense_loss():
    figures = run(dense).figures
    assert figures.ms_p20 <= figures.ms <= figures.ms_p80
    logits_bytes = CASE.tokens * CASE.classes * 4
    assert logits_bytes <= figures.peak_bytes <= 4 * logits_bytes
    assert len(figures.errors) == 3
    assert max(figures.errors) < 1e-6


def test_errors_relative():
    """A loss that is 1 % too large, scaled after the fact, has 1 % errors everywhere."""
    figures = run(lambda *inputs: dense(*inputs) * 1.01).figures
    assert figures.errors == pytest.approx((0.01, 0.01, 0.01), rel=1e-3)


def test_forward_without_gradient():
    seen = []

    def spy(*inputs):
        seen.append(torch.is_grad_enabled() or inputs[0].requires_grad)
        return dense(*inputs)

    figures = run(spy, Mode.FORWARD).figures
    assert seen
    assert not any(seen)
    assert len(figures.errors) == 1
    assert figures.errors[0] < 1e-6


def test_peak_without_loss_and_gradients():
    def frugal(workspace):
        class Constant(torch.autograd.Function):
            @staticmethod
            def forward(ctx, input_ND, weight_VD):
                ctx.save_for_backward(input_ND, weight_VD)
                torch.empty(workspace, dtype=torch.uint8)
                return torch.zeros(())

            @staticmethod
            def backward(ctx, grad):
                torch.empty(workspace, dtype=torch.uint8)
                return tuple(torch.zeros_like(saved) for saved in ctx.saved_tensors)

        return run(lambda input_ND, weight_VD, target_N: Constant.apply(input_ND, weight_VD)).figures

    gradients = 4 * CASE.features * (CASE.tokens + CASE.classes)
    assert frugal(0).peak_bytes < 64
    assert frugal(MIB).peak_bytes == pytest.approx(MIB - gradients, abs=64)


def test_failures_are_rows_with_reasons():
    def refuse(case):
        raise Unavailable("not installed: No module named 'peer'")

    def explode(*inputs):
        raise RuntimeError("out of luck\nand more lines")

    absent, broken, fine = rows(
        CASE,
        [Provider("absent", "peer", refuse), provider(explode, "broken"), provider(dense, "fine")],
        Mode.STEP,
    )
    assert (absent.figures, absent.failed) == (None, False)
    assert absent.reason == "not installed: No module named 'peer'"
    assert (broken.figures, broken.failed) == (None, True)
    assert broken.reason == "RuntimeError: out of luck"
    assert fine.figures is not None
    assert (fine.reason, fine.failed) == ("", False)


def test_case_too_large():
    huge = LossCase("huge", 2**40, 2**20, 2**20, torch.float32, "cpu")
    one, other = rows(huge, [provider(dense, "one"), provider(dense, "other")], Mode.STEP)
    assert one.failed
    assert other.failed
    assert one.reason.startswith("RuntimeError")


def test_plain_entry_timed_in_turn(monkeypatch):
    order = []

    def named(name):
        def loss(*inputs):
            order.append(name)
            return dense(*inputs)

        return provider(loss, name)

    products = measure.floor
    monkeypatch.setattr(measure, "floor", lambda *of: lambda: (order.append("floor"), products(*of)()))
    (row,) = rows(CASE, [named("option")], Mode.STEP, named("plain"))
    # twice each, and as often as lowtide needs to record a call
    first = 2 * (2 + measure.WARM_CALLS)
    warm, timed = order[:first], order[first:]
    assert warm == ["plain"] * (2 + measure.WARM_CALLS) + ["option"] * (2 + measure.WARM_CALLS)
    assert all(set(turn) == {"floor", "plain", "option"} for turn in zip(*[iter(timed)] * 3, strict=True))
    assert len(timed) >= 3 * (1 + measure.MIN_ROUNDS)
    figures = row.figures
    assert figures.plain_ms > 0
    assert figures.errors == ()


def test_plain_entry_result_not_finite():
    bad = provider(lambda *inputs: dense(*inputs) * torch.inf, "bad")
    (row,) = rows(CASE, [bad], Mode.STEP, provider(dense))
    assert row.failed
    assert row.reason == "FloatingPointError: a result is not finite"


@pytest.mark.parametrize(("own", "wide", "chosen"), [(1.0, 2.0, torch.bfloat16), (2.0, 1.0, torch.float32)])
def test_floor_of_half_precision_in_quicker_dtype(own, wide, chosen, monkeypatch):
    monkeypatch.setattr(measure, "alternate", lambda calls, rounds, device: [[9.0, own], [wide, 9.0]])
    case = LossCase("tiny", 96, 16, 80, torch.bfloat16, "cpu")
    x_ND, w_VD, target_N = case.inputs(requires_grad=True)
    assert measure.products_dtype(x_ND.detach(), w_VD.detach()) is chosen
    products, dtypes = torch.mm, []

    def mm(a, b, out):
        dtypes.extend((a.dtype, b.dtype, out.dtype))
        return products(a, b, out=out)

    monkeypatch.setattr(torch, "mm", mm)
    floor(x_ND, w_VD, target_N, Mode.STEP)()
    assert dtypes == 9 * [chosen]


def test_floor_of_float32(monkeypatch):
    monkeypatch.setattr(measure, "alternate", None)
    assert measure.products_dtype(*CASE.inputs(requires_grad=False)[:2]) is torch.float32


def test_slow_provider_timed_once(monkeypatch):
    monkeypatch.setattr(measure, "SLOW_MS", 50.0)
    calls = []

    def slow(*inputs):
        calls.append(time.sleep(0.06))
        return dense(*inputs)

    figures = run(slow).figures
    assert len(calls) == 2, "one to warm up, one for memory and time"
    assert figures.ms == figures.ms_p20 == figures.ms_p80 >= 60
    assert figures.floor_ms < 50


def test_out_of_memory_is_no_failure():
    def explode(*inputs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 40 GiB\nand more lines")

    row = run(explode)
    assert (row.figures, row.failed) == (None, False)
    assert row.reason == (
        "does not fit in memory: OutOfMemoryError: CUDA out of memory. Tried to allocate 40 GiB"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", Mode)
def test_figures_on_cuda(mode):
    case = LossCase("tiny", 2048, 512, 8192, torch.bfloat16, "cuda")
    figures = run(dense, mode, case).figures
    assert figures.ratio > 0.9
    wide_logits_bytes = case.tokens * case.classes * 4
    assert wide_logits_bytes <= figures.peak_bytes <= 4 * wide_logits_bytes
    assert len(figures.errors) == (3 if mode is Mode.STEP else 1)
    assert max(figures.errors) < 1e-2
