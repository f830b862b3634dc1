"""Compute each row's coefficients from its sums, in one Triton kernel, for the exponentials engine.

The kernel computes lse - z_t of each row, and the coefficients c and h of the row's gradient
(exponentials/engine.py has the formulas). It also adds up the partial sums of recomputed row tiles.
It handles a chunk in one launch, where plain torch would take two dozen.

Shapes: C tokens of a chunk, T half tiles of a row.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import reduced, reducing
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import (
    target_nll,
    target_numerator,
    whole_softmax_coef,
)
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import row_at


@remember_launches
@triton.jit
def _coefficients_kernel(
    logit_C_ptr, max_C_ptr, sum_C_ptr, ignored_C_ptr, softmax_coef_C_ptr, target_coef_C_ptr,
    lse_coef_C_ptr, entropy_coef_C_ptr, slope_C_ptr, nll_C_ptr, row_scale_C_ptr,
    target_weight_coef_ptr, row_C_ptr, partials_TC_ptr, marks_ptr, T, C,
    HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute c and h of G = c E + h [v = t], and lse - z_t if wanted. Grid: (C / BLOCK_C,).

    If partial sums are given, add up those of marked row tiles first. h is stored at each row's own
    number, and all other results at the row's place (counted_rows.py).
    """
    first = tl.program_id(0) * BLOCK_C
    rows = first + tl.arange(0, BLOCK_C)
    inside = rows < C
    logit = tl.load(logit_C_ptr + rows, mask=inside, other=0.0)
    distance = tl.load(max_C_ptr + rows, mask=inside, other=0.0) - logit
    sum = tl.load(sum_C_ptr + rows, mask=inside, other=0.0)
    if partials_TC_ptr is not None:
        marked = tl.load(marks_ptr + 1 + first // HEIGHT)
        if marked != 0:
            sum = reduced(partials_TC_ptr, rows, T, C, False, BLOCK_C, BLOCK_T)
            tl.store(sum_C_ptr + rows, sum, mask=inside)
    ignored = tl.load(ignored_C_ptr + rows, mask=inside, other=0) != 0
    exp = tl.exp(-distance)
    total = exp + sum
    lse = logit + (distance + tl.log(total))
    if nll_C_ptr is not None:
        tl.store(nll_C_ptr + rows, target_nll(distance, sum, total), mask=inside)
    exp = tl.where(ignored, 1.0, exp)
    total = exp + sum
    softmax_coef = tl.load(softmax_coef_C_ptr + rows, mask=inside, other=0.0)
    target_coef = tl.load(target_coef_C_ptr + rows, mask=inside, other=0.0)
    lse_coef = None
    if lse_coef_C_ptr is not None:
        lse_coef = tl.load(lse_coef_C_ptr + rows, mask=inside, other=0.0)
    softmax_coef = whole_softmax_coef(softmax_coef, None, 0.0, lse_coef, tl.where(ignored, 0.0, lse))
    rest = target_numerator(softmax_coef, target_coef, exp, sum)
    if entropy_coef_C_ptr is None:
        row_scale = softmax_coef / total
    else:  # E already includes softmax_coef and entropy_coef
        row_scale = 1.0 / total
        above = tl.where(ignored | (exp == 0.0), 0.0, -distance)
        rest += tl.load(entropy_coef_C_ptr + rows, mask=inside, other=0.0) * above * exp
    rest /= total
    if slope_C_ptr is not None:
        rest *= tl.load(slope_C_ptr + rows, mask=inside, other=0.0)
    tl.store(row_scale_C_ptr + rows, tl.where(ignored, 0.0, row_scale), mask=inside)
    tl.store(target_weight_coef_ptr + row_at(row_C_ptr, rows, inside), rest, mask=inside)


def coefficients(
    row: RowCoefs,
    stat: ExcludedTargetStats,
    logit_C: Tensor,
    slope_C: Tensor | None,
    row_scale_C: Tensor,
    target_weight_coef: Tensor,
    *,
    counted: CountedChunk = ALL,
    take_nll: bool,
    partials_TC: Tensor | None,
    marks: Tensor | None,
) -> None:
    """Write c to row_scale_C and h to target_weight_coef.

    With `take_nll`, write lse - z_t to stat.nll_N. If partials_TC is given, add up its partial sums
    in marked row tiles first, and write them to stat.sum_N.
    """
    C, T = logit_C.shape[0], 0 if partials_TC is None else partials_TC.shape[0]
    grid, options = reducing(C)
    _coefficients_kernel[grid](
        logit_C, stat.max_N, stat.sum_N, row.ignored_N, row.softmax_coef_N, row.target_coef_N,
        row.lse_coef_N, row.entropy_coef_N,
        slope_C, stat.nll_N if take_nll else None, row_scale_C, target_weight_coef,
        counted.row_C, partials_TC, marks, T, C, **options,
    )  # fmt: skip
