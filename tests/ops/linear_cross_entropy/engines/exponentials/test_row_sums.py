"""Sums of tiles are put together (recompute.py, row_math_triton.py), and targets are put in order:
on a card as it is, on the CPU through the interpreter."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lowtide.ops.linear_cross_entropy.engines.exponentials import recompute, target_order
from lowtide.ops.linear_cross_entropy.engines.formulas import row_math_triton
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LARGEST_SUM

SIZES = pytest.mark.parametrize(("T", "C"), [(300, 333), (2, 1), (128, 129), (1002, 64)])


def no_marks(C: int, device: str) -> torch.Tensor:
    return recompute.marks_memory(torch.empty(C, device=device)).zero_()


def marked_tiles(C: int) -> list[int]:
    """The marks of the row in the middle: of any tile, and of each, which are 128 high."""
    return [1, *(int(start <= C // 2 < start + 128) for start in range(0, C, 128))]


@SIZES
def test_row_sums(device, T, C):
    """Of all rows, or of those in marked tiles alone."""
    repair = torch.tensor(marked_tiles(C), dtype=torch.int32, device=device)
    partials_TC, before_C = torch.randn(T, C, device=device), torch.randn(C, device=device)
    exact_C = partials_TC.double().sum(0)
    marked_C = repair[1:].repeat_interleave(128)[:C].bool()
    for marks, expected_C in ((None, exact_C), (repair, torch.where(marked_C, exact_C, before_C.double()))):
        found_C = before_C.clone()
        recompute.add_partials(partials_TC, found_C, marks=marks)
        error = (found_C - expected_C).abs()
        assert (error <= 2**-21 * (partials_TC.abs().sum(0) + before_C.abs())).all()


@SIZES
@pytest.mark.parametrize("sum", [LARGEST_SUM, LARGEST_SUM * 1.01, torch.inf, torch.nan])
def test_far_rows(device, T, C, sum):
    """The tile of a row whose sum is too large or NaN is marked, and this row gets its maximum as
    reference; unless it is ignored."""
    partials_TC = torch.zeros(T, C, device=device)
    partials_TC[-1, C // 2] = sum
    marks, sum_C = no_marks(C, device), torch.empty(C, device=device)
    recompute.add_partials(partials_TC, sum_C, marks=marks, mark=True)
    assert torch.equal(sum_C.nan_to_num(-1), partials_TC.sum(0).nan_to_num(-1))
    far = not sum <= LARGEST_SUM
    assert marks.tolist() == (marked_tiles(C) if far else [0] * len(marks))
    maxima_TC = torch.randn(T, C, device=device)
    for ignored in (False, True):
        ignored_C = torch.full((C,), ignored, device=device)
        expected_C = torch.randn(C, device=device)
        found_C = expected_C.clone()
        recompute.replace_references(maxima_TC, sum_C, ignored_C, found_C, marks)
        if far and not ignored:
            expected_C[C // 2] = maxima_TC[:, C // 2].amax()
        assert torch.equal(found_C, expected_C)


@SIZES
@pytest.mark.parametrize("logit", [3e38, torch.inf, -torch.inf])
def test_infinite_rows(device, T, C, logit):
    """The tile of a row whose largest logit is infinite is marked, unless the row is ignored."""
    maxima_TC, ignored_C = torch.randn(T, C, device=device), torch.zeros(C, dtype=torch.bool, device=device)
    maxima_TC[: T if logit < 0 else 1, C // 2] = logit
    for ignored in (False, True):
        ignored_C[C // 2] = ignored
        marks = no_marks(C, device)
        recompute.mark_infinite(maxima_TC, ignored_C, marks)
        infinite = not ignored and logit != 3e38
        assert marks.tolist() == (marked_tiles(C) if infinite else [0] * len(marks))


@pytest.mark.parametrize("first_class", [0, 13])
@pytest.mark.parametrize(
    ("N", "rows", "V"),
    [(1, 1, 40), (300, 300, 40), (300, 1000, 40), (301, 100, 40), (131, 33, 40), (0, 0, 40), (700, 600, 40),
     (5, 2, 2**30)],
)  # fmt: skip
def test_targets_in_order(device, monkeypatch, N, rows, V, first_class):
    """Counting gives what torch's sort does in each chunk; keys of many classes have 64 bits."""
    target_N = torch.randint(min(V, 60), (N,), device=device)
    ignored_N = torch.rand(N, device=device) < 0.2
    sort = partial(target_order.sorted_targets, target_N, ignored_N, V, rows, first_class=first_class)
    counted = sort()
    monkeypatch.setattr(target_order, "COUNTED_ROWS", 0)
    by_torch = sort()
    class_N = target_N - first_class
    class_N = torch.where(ignored_N | (class_N < 0) | (class_N >= V), V, class_N)
    for found in (counted, by_torch):
        assert found[0].dtype == (torch.int32 if V == 40 else torch.int64)
        for start in range(0, N, max(rows, 1)):
            chunk = slice(start, start + rows)
            order = sorted(range(start, min(start + rows, N)), key=lambda n: int(class_N[n]))
            assert found[1][chunk].tolist() == order
            assert torch.equal(found[0][chunk], class_N[order].to(found[0].dtype))


@triton.jit
def _log1p_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, row_math_triton.log1p(tl.load(x_ptr + place)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter warns at 0
def test_log1p_digits(device):
    values = [0, 1e-45, 1e-30, 1e-9, 6e-8, 1.2e-7, 1e-3, 0.5, 0.9999999, 1, 1.5, 1e10, 1e38]
    x = torch.tensor([*values, 3e-5, torch.inf, torch.nan], device=device)
    found = torch.empty_like(x)
    _log1p_kernel[(1,)](x, found, BLOCK=16)
    exact = x.double().log1p()
    assert found[0] == 0
    assert found[-2] == torch.inf
    assert found[-1].isnan()
    assert ((found - exact).abs() <= 2e-7 * exact)[:-2].all()
