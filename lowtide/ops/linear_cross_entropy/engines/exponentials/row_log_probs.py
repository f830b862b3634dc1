"""Combine the half tiles' results into statistics for log-probabilities and entropies, in Triton.

Each half tile has two sums relative to its own largest logit m: sum exp(z - m) and
sum exp(z - m) (z - m), both without the target. One launch handles a chunk, where plain torch would
take two dozen.

Shapes: C tokens of a chunk, T half tiles of a row; lower case = one tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import reducing
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows

# Replaces smaller differences m - r, such as -inf if m is -inf. exp(-200) is 0 in float32, and 0
# times -200 is 0, but 0 times -inf would be NaN.
LOWEST = tl.constexpr(-200.0)


@remember_launches
@triton.jit
def _log_probs_kernel(
    sum_TC_ptr, mean_TC_ptr, max_TC_ptr, argmax_TC_ptr, logit_C_ptr, target_C_ptr,
    max_C_ptr, sum_C_ptr, mean_C_ptr, argmax_C_ptr, count_ptr, first_place, T, C,
    HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute r, S, sum p (z - r) and the class of the largest logit. Grid: (C / BLOCK_C,).

    r is the row's largest logit, and S = sum exp(z - r) without the target. A program without a row
    that counts reads no results of half tiles, and stores r = z_t and S = 0.
    """
    first = tl.program_id(0) * BLOCK_C
    T = tl.where(first < counted_rows(count_ptr, first_place, C), T, 0)
    rows = first + tl.arange(0, BLOCK_C)
    inside = rows < C
    max_tc = tl.full((BLOCK_T, BLOCK_C), -float("inf"), tl.float32)
    argmax_tc = tl.full((BLOCK_T, BLOCK_C), 0, tl.int32)
    for start in range(0, T, BLOCK_T):
        parts = start + tl.arange(0, BLOCK_T)
        mask_tc = (parts[:, None] < T) & inside[None, :]
        place_tc = parts[:, None].to(tl.int64) * C + rows[None, :]
        more_tc = tl.load(max_TC_ptr + place_tc, mask=mask_tc, other=-float("inf"))
        class_tc = tl.load(argmax_TC_ptr + place_tc, mask=mask_tc, other=0)
        larger_tc = more_tc > max_tc
        argmax_tc = tl.where(larger_tc, class_tc, argmax_tc)
        max_tc = tl.where(larger_tc, more_tc, max_tc)
    max_c = tl.max(max_tc, 0)
    argmax_c = tl.min(tl.where(max_tc == max_c[None, :], argmax_tc, 2147483647), 0)
    logit_c = tl.load(logit_C_ptr + rows, mask=inside, other=0.0)
    target_c = tl.load(target_C_ptr + rows, mask=inside, other=0)
    # Another kernel has computed logit_c, and rounded it differently. If the target's logit is the
    # largest, r must be exactly logit_c, so that lse - z_t = log(1 + S).
    max_c = tl.where((argmax_c == target_c) | (T == 0), logit_c, max_c)
    sum_tc = tl.full((BLOCK_T, BLOCK_C), 0.0, tl.float32)
    mean_tc = tl.full((BLOCK_T, BLOCK_C), 0.0, tl.float32)
    for start in range(0, T, BLOCK_T):
        parts = start + tl.arange(0, BLOCK_T)
        mask_tc = (parts[:, None] < T) & inside[None, :]
        place_tc = parts[:, None].to(tl.int64) * C + rows[None, :]
        more_tc = tl.load(max_TC_ptr + place_tc, mask=mask_tc, other=-float("inf"))
        shift_tc = more_tc - max_c[None, :]
        shift_tc = tl.where(shift_tc < LOWEST, LOWEST, shift_tc)  # keeps NaN
        part_tc = tl.load(sum_TC_ptr + place_tc, mask=mask_tc, other=0.0)
        part_mean_tc = tl.load(mean_TC_ptr + place_tc, mask=mask_tc, other=0.0) + part_tc * shift_tc
        factor_tc = tl.exp(shift_tc)
        sum_tc += part_tc * factor_tc
        mean_tc += part_mean_tc * factor_tc
    sum_c, mean_c = tl.sum(sum_tc, 0), tl.sum(mean_tc, 0)
    distance_c = max_c - logit_c
    exp_c = tl.exp(-distance_c)
    mean_c -= tl.where(exp_c == 0.0, 0.0, exp_c * distance_c)
    tl.store(max_C_ptr + rows, max_c, mask=inside)
    tl.store(sum_C_ptr + rows, sum_c, mask=inside)
    tl.store(mean_C_ptr + rows, mean_c / (exp_c + sum_c), mask=inside)
    tl.store(argmax_C_ptr + rows, argmax_c.to(tl.int64), mask=inside)


def combine(
    partials: dict[str, Tensor],
    row: RowCoefs,
    stat: ExcludedTargetStats,
    logit_C: Tensor,
    counted: CountedChunk = ALL,
) -> None:
    """Write max_N, sum_N, mean_N and argmax_N of `stat` from the half tiles' partial results."""
    T, C = partials["maxima"].shape
    grid, options = reducing(C)
    _log_probs_kernel[grid](
        partials["sums"], partials["means"], partials["maxima"], partials["places"], logit_C, row.target_N,
        stat.max_N, stat.sum_N, stat.mean_N, stat.argmax_N, counted.number, counted.first_place, T, C,
        **options,
    )  # fmt: skip
