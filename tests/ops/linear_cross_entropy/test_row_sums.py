"""What tiles find, put together (repair_kernels.py, coefficient_kernels.py): on a card as it is, on the CPU
through the interpreter."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from lowtide.ops.linear_cross_entropy.engines.exponentials import recompute, row_coefficients


@pytest.mark.parametrize("largest", [False, True])
@pytest.mark.parametrize(("T", "C"), [(300, 333), (2, 1), (128, 129), (1002, 64)])
def test_row_sums_and_maxima(device, T, C, largest):
    """Of all rows, or of those in marked tiles alone, which are 128 high."""
    rows_C = torch.zeros(C, dtype=torch.bool, device=device)
    rows_C[C // 2] = True
    repair = recompute.mark_tiles(rows_C)
    marked = [start <= C // 2 < start + 128 for start in range(0, C, 128)]
    assert repair.tolist() == [1, *map(int, marked)]
    assert recompute.mark_tiles(torch.zeros_like(rows_C)).tolist() == [0] * (1 + len(marked))
    partials_TC, before_C = torch.randn(T, C, device=device), torch.randn(C, device=device)
    exact_C = partials_TC.amax(0) if largest else partials_TC.double().sum(0)
    marked_C = repair[1:].repeat_interleave(128)[:C].bool()
    for marks, expected_C in ((None, exact_C), (repair, torch.where(marked_C, exact_C, before_C.double()))):
        found_C = before_C.clone()
        recompute.reduce_partials(partials_TC, found_C, largest=largest, marks=marks)
        error = (found_C - expected_C).abs()
        assert (error <= 2**-21 * (partials_TC.abs().sum(0) + before_C.abs()) * (not largest)).all()


@triton.jit
def _log1p_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    place = tl.arange(0, BLOCK)
    tl.store(out_ptr + place, row_coefficients._log1p(tl.load(x_ptr + place)))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, at 0
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
