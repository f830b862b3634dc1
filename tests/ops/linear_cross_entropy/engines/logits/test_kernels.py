"""The pass over a tile of logits, in Triton (interpreted on a CPU) and torch, against float64."""

import pytest
import torch

from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    LogitTransform,
    RowCoefs,
    SoftmaxStats,
    TileColumns,
)
from lowtide.ops.linear_cross_entropy.engines.logits import softmax_torch
from tests.support.loss import interpreted, norm

pytest.importorskip("triton")

import triton
import triton.language as tl

from lowtide.core.kernels.triton_helpers import slope_of_tanh, tanh_and_room
from lowtide.ops.linear_cross_entropy.engines.logits import softmax_triton

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=["triton", "torch"])
def softmax_gradient_(request, device):
    if request.param == "torch":
        return softmax_torch.softmax_gradient_
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    return softmax_triton.softmax_gradient_


@pytest.fixture(params=[16, 16384])
def block(request, monkeypatch):
    monkeypatch.setattr(softmax_triton, "BLOCK", request.param)
    monkeypatch.setattr(softmax_triton, "SMALL_BLOCK", min(request.param, 4096))
    return request.param


class Case:
    """Logits of C rows and V classes in columns of a wider buffer, and all that goes with it."""

    def __init__(self, device, C=6, V=45, *, bias=False, class_weight=False, smoothing=0.0, padding=0):
        self.C, self.V, self.smoothing = C, V, smoothing
        stride = V + padding
        self.logits = torch.full((C, stride), 1e9, device=device)[:, :V]
        self.logits.copy_(torch.randn(C, V) * 3)
        self.bias = torch.randn(V, device=device) if bias else None
        self.class_weight = torch.rand(V, device=device) + 0.5 if class_weight else None
        self.target = torch.randint(V, (C,), device=device)
        self.upstream = torch.randn(C, device=device)
        self.weight_V = torch.ones(V, device=device) if self.class_weight is None else self.class_weight

    @property
    def terms(self):
        hit = self.upstream * (1 - self.smoothing) * self.weight_V[self.target]
        spread = self.upstream * self.smoothing / self.V
        softmax_coef = hit + spread * self.weight_V.sum()
        return RowCoefs(
            self.target, self.upstream == 0, softmax_coef, hit, spread if self.smoothing else None
        )

    def statistics(self):
        vectors = [torch.empty(self.C, device=self.logits.device) for _ in range(4)]
        return SoftmaxStats(*vectors[: 4 if self.smoothing else 3])

    def exact(self):
        """max, sum, gap, smooth and the gradient of each row, in float64."""
        z = self.logits.double() + (0 if self.bias is None else self.bias.double())
        row_max = z.amax(1)
        total = (z - row_max[:, None]).exp().sum(1)
        gap = z.logsumexp(1)[:, None] - z
        terms = self.terms
        gradient = z.softmax(1) * terms.softmax_coef_N.double()[:, None]
        gradient[torch.arange(self.C), self.target] -= terms.target_coef_N.double()
        if self.smoothing:
            gradient -= terms.smoothing_coef_N.double()[:, None] * self.weight_V.double()
        target_gap = gap.gather(1, self.target[:, None])[:, 0]
        return row_max, total, target_gap, gap @ self.weight_V.double(), gradient

    def run(self, function, statistics, gradient_dtype, *, take_stats, classes=slice(0, None)):
        return function(
            self.logits[:, classes].contiguous() if classes.stop else self.logits,
            self.terms,
            statistics,
            TileColumns(
                first_class=classes.start,
                transform=LogitTransform(None if self.bias is None else self.bias[classes]),
                class_weight_B=None if self.class_weight is None else self.class_weight[classes],
            ),
            take_stats=take_stats,
            gradient_dtype=gradient_dtype,
        )


def rounded(exact, dtype, function):
    """To the nearest; but Triton's interpreter cuts float32 off after the bits of bfloat16."""
    if function is softmax_triton.softmax_gradient_ and interpreted() and dtype == torch.bfloat16:
        return (exact.float().view(torch.int32) & -65536).view(torch.float32).double()
    return exact.to(dtype).double()


def close(got, want, *, dtype=torch.float32, function=None):
    """Within a rounding to dtype, and eight of float32 numbers before it (exp, log, their sums)."""
    allowed = 8 * torch.finfo(torch.float32).eps * norm(want)
    if dtype != torch.float32:
        allowed += norm(rounded(want, dtype, function) - want) * 1.1
    assert got.dtype == dtype
    assert norm(got.double() - want) <= allowed, f"{norm(got.double() - want):.3e} exceeds {allowed:.3e}"


EXTRAS = [
    {},
    {"bias": True},
    {"smoothing": 0.1},
    {"smoothing": 0.1, "class_weight": True},
    {"bias": True, "smoothing": 0.1, "class_weight": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("V", [1, 2, 45, 64])
@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: "-".join(extras) or "plain")
@pytest.mark.parametrize("padding", [0, 3])
def test_statistics_and_gradient(device, softmax_gradient_, block, padding, extras, V, dtype):
    if block > 16 and (V != 45 or padding):
        pytest.skip("one block is the easier case")
    case = Case(device, V=V, padding=padding, **extras)
    row_max, total, gap, smooth, gradient = case.exact()
    statistics = case.statistics()
    got = case.run(softmax_gradient_, statistics, dtype, take_stats=True)
    close(statistics.max_N, row_max)
    close(statistics.sum_N, total)
    # A gap is the difference of two numbers of the size of the logits.
    scale = row_max.abs() + total.log().abs() + gap.abs()
    assert norm(statistics.nll_N.double() - gap) <= 4 * torch.finfo(torch.float32).eps * norm(scale)
    if case.smoothing:
        scale = scale * case.weight_V.sum()
        assert norm(statistics.smooth_nll_N.double() - smooth) <= 4 * torch.finfo(torch.float32).eps * norm(
            scale
        )
    if V > 1:
        close(got, gradient, dtype=dtype, function=softmax_gradient_)
    else:  # p - 1 = 0, after sums of numbers near 1
        assert got.double().abs().max() <= 4 * torch.finfo(torch.float32).eps * case.upstream.abs().max() * 2


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_statistics_alone(device, softmax_gradient_, block, smoothing):
    case = Case(device, smoothing=smoothing, bias=True)
    row_max, total, gap, *_ = case.exact()
    statistics = case.statistics()
    assert case.run(softmax_gradient_, statistics, None, take_stats=True) is None
    close(statistics.max_N, row_max)
    close(statistics.sum_N, total)
    close(statistics.nll_N, gap)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extras", EXTRAS, ids=lambda extras: "-".join(extras) or "plain")
def test_gradient_of_some_classes(device, softmax_gradient_, block, extras, dtype):
    """With statistics that are known; targets before, inside and behind the block of classes."""
    case = Case(device, 8, **extras)
    case.target[:4] = torch.tensor([0, 13, 29, 30])
    row_max, total, *_, gradient = case.exact()
    statistics = SoftmaxStats(row_max.float(), total.float())
    known = [statistics.max_N.clone(), statistics.sum_N.clone()]
    for classes in (slice(0, 13), slice(13, 30), slice(30, 45)):
        part = Case(device, 8, **extras)
        part.__dict__.update(case.__dict__, logits=case.logits.clone())
        got = part.run(softmax_gradient_, statistics, dtype, take_stats=False, classes=classes)
        close(got, gradient[:, classes], dtype=dtype, function=softmax_gradient_)
        assert torch.equal(statistics.max_N, known[0])
        assert torch.equal(statistics.sum_N, known[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_overwrites_logits(device, block, dtype):
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    case = Case(device, padding=3)
    buffer = case.logits.as_strided((6, 48), (48, 1))
    got = case.run(softmax_triton.softmax_gradient_, case.statistics(), dtype, take_stats=True)
    start = buffer.data_ptr() + (0 if dtype == torch.float32 else 48 * 2)
    assert got.data_ptr() == start
    assert got.stride() == (48 * 4 // dtype.itemsize, 1)
    assert buffer[:, 45:].eq(1e9).all() or dtype != torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_kernel_skips_ignored_rows(device, block, smoothing, dtype):
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    case = Case(device, smoothing=smoothing)
    case.upstream[[1, 4]] = 0
    *_, gradient = case.exact()
    case.logits[[1, 4]] = torch.nan
    case.target[[1, 4]] = 0
    statistics = case.statistics()
    got = case.run(softmax_triton.softmax_gradient_, statistics, dtype, take_stats=True)
    assert got[[1, 4]].eq(0).all()
    gradient[[1, 4]] = 0
    close(got, gradient, dtype=dtype, function=softmax_triton.softmax_gradient_)
    assert statistics.max_N.isfinite().all()
    assert statistics.sum_N.isfinite().all()


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(device, softmax_gradient_, block, offset):
    case = Case(device)
    case.logits += offset
    row_max, total, gap, _, gradient = case.exact()
    statistics = case.statistics()
    got = case.run(softmax_gradient_, statistics, torch.float32, take_stats=True)
    close(statistics.max_N, row_max)
    close(statistics.sum_N, total)
    close(got, gradient)
    close(statistics.nll_N, gap)


def test_no_rows(device, softmax_gradient_):
    case = Case(device, C=0)
    got = case.run(softmax_gradient_, case.statistics(), torch.bfloat16, take_stats=False)
    assert got.shape == (0, 45)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of the series far from 0
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e-3, 0.2, 0.2499999, 0.25, 0.3, 1.0, 5.0, 20.0, 1e30])
def test_tanh_digits(device, size):
    """Near 0 too, where 1 - 2 / (1 + exp(2 x)) has none."""
    if device == "cpu" and not interpreted():
        pytest.skip("on the CPU the kernels run through the interpreter alone")
    case = Case(device, C=2, V=2)
    case.logits = torch.tensor([[size, -size], [0.0, size]], device=device)
    columns = TileColumns(0, LogitTransform(softcap=1.0))
    statistics = case.statistics()
    softmax_triton.softmax_gradient_(
        case.logits, case.terms, statistics, columns, take_stats=True, gradient_dtype=None
    )
    exact = torch.tensor([size, size], dtype=torch.float64).tanh()
    torch.testing.assert_close(statistics.max_N.double().cpu(), exact, rtol=4e-7, atol=0)


@triton.jit
def _tanh_kernel(x_ptr, tanh_ptr, slope_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tanh, room = tanh_and_room(tl.load(x_ptr + place))
    tl.store(tanh_ptr + place, tanh)
    tl.store(slope_ptr + place, slope_of_tanh(room))


def test_tanh_and_its_slope(device):
    """Each to a few units in the last place, also where 1 - tanh^2 is 0 in float32.

    On a card exp(-2 x) errs by as many units as the argument rounds: half of 2 |x|.
    """
    x = torch.cat([torch.linspace(-20, 20, 3000), torch.logspace(-6, 0, 1096)]).to(device)
    tanh, slope = torch.empty_like(x), torch.empty_like(x)
    _tanh_kernel[(1,)](x, tanh, slope, BLOCK=4096)
    exact = x.double()
    units = 8 + (x.abs() if device == "cuda" else 0)
    for got, want in ((tanh, exact.tanh()), (slope, exact.cosh() ** -2)):
        assert (((got - want) / want).abs() <= units * torch.finfo(torch.float32).eps).all()
