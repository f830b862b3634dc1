"""Merge statistics as excluded_part_stats.py does for a loss, one Triton launch per function.

In torch some of these functions take two dozen launches, during which the device has no other work.

Shapes: C tokens of a chunk; P ranks; K numbers of a row that ranks exchange; lower case = one tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import target_nll

BLOCK_C = 128
INFINITY = tl.constexpr(float("inf"))
NAN_TOO = tl.constexpr(tl.PropagateNan.ALL)


@remember_launches
@triton.jit
def _first_references_kernel(
    logit_C_ptr, sampled_C_ptr, place_C_ptr, ignored_C_ptr, reference_C_ptr, C, BLOCK_C: tl.constexpr
):  # fmt: skip
    """Write each row's first reference, and the logit -inf where another rank has the target."""
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = rows < C
    own_c = tl.load(place_C_ptr + rows, mask=inside, other=-1) >= 0
    ignored_c = tl.load(ignored_C_ptr + rows, mask=inside, other=1) != 0
    logit_c = tl.load(logit_C_ptr + rows, mask=inside, other=0.0)
    sampled_c = tl.load(sampled_C_ptr + rows, mask=inside, other=0.0)
    reference_c = tl.where(ignored_c, INFINITY, tl.where(own_c, logit_c, sampled_c))
    tl.store(reference_C_ptr + rows, reference_c, mask=inside)
    tl.store(logit_C_ptr + rows, tl.where(own_c, logit_c, -INFINITY), mask=inside)


@remember_launches
@triton.jit
def _pack_kernel(
    max_C_ptr, sum_C_ptr, logit_C_ptr, place_C_ptr, ignored_C_ptr, smooth_logit_C_ptr, out_KC_ptr, C,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the K numbers of each row that this rank sends."""
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = rows < C
    own_c = tl.load(place_C_ptr + rows, mask=inside, other=-1) >= 0
    absent_c = tl.load(ignored_C_ptr + rows, mask=inside, other=1) != 0
    max_c = tl.load(max_C_ptr + rows, mask=inside, other=0.0)
    sum_c = tl.load(sum_C_ptr + rows, mask=inside, other=0.0)
    logit_c = tl.load(logit_C_ptr + rows, mask=inside, other=0.0)
    absent_c |= (max_c == -INFINITY) | ((sum_c == 0.0) & (max_c < INFINITY))
    tl.store(out_KC_ptr + rows, tl.where(absent_c, -INFINITY, max_c), mask=inside)
    tl.store(out_KC_ptr + C + rows, tl.where(absent_c, 0.0, sum_c), mask=inside)
    tl.store(out_KC_ptr + 2 * C + rows, tl.where(own_c, logit_c, 0.0), mask=inside)
    if smooth_logit_C_ptr is not None:
        smooth_logit_c = tl.load(smooth_logit_C_ptr + rows, mask=inside, other=0.0)
        tl.store(out_KC_ptr + 3 * C + rows, smooth_logit_c, mask=inside)


@remember_launches
@triton.jit
def _merge_kernel(
    parts_PKC_ptr, own_KC_ptr, ignored_C_ptr, total_weight_ptr, max_C_ptr, sum_C_ptr, target_logit_C_ptr,
    nll_C_ptr, smooth_nll_C_ptr, factor_C_ptr, P, K, C, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Merge the statistics of all ranks, and write exp(r_p - r) of this rank."""
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = rows < C
    ignored_c = tl.load(ignored_C_ptr + rows, mask=inside, other=1) != 0
    largest_c = tl.full((BLOCK_C,), -INFINITY, tl.float32)
    logit_c = tl.zeros((BLOCK_C,), tl.float32)
    smooth_c = tl.zeros((BLOCK_C,), tl.float32)
    for part in range(0, P):
        part_ptr = parts_PKC_ptr + part * K * C + rows
        largest_c = tl.maximum(largest_c, tl.load(part_ptr, mask=inside, other=0.0), propagate_nan=NAN_TOO)
        logit_c += tl.load(part_ptr + 2 * C, mask=inside, other=0.0)
        if smooth_nll_C_ptr is not None:
            smooth_c += tl.load(part_ptr + 3 * C, mask=inside, other=0.0)
    reference_c = tl.maximum(logit_c, largest_c, propagate_nan=NAN_TOO)
    sum_c = tl.zeros((BLOCK_C,), tl.float32)
    for part in range(0, P):
        part_ptr = parts_PKC_ptr + part * K * C + rows
        of_part_c = tl.load(part_ptr, mask=inside, other=0.0)
        part_sum_c = tl.load(part_ptr + C, mask=inside, other=0.0)
        shift_c = tl.where(of_part_c == -INFINITY, -INFINITY, of_part_c - reference_c)
        sum_c += tl.exp(shift_c) * part_sum_c
    distance_c = reference_c - logit_c
    target_exp_c = tl.exp(-distance_c)
    total_c = target_exp_c + sum_c
    tl.store(max_C_ptr + rows, tl.where(ignored_c, INFINITY, reference_c), mask=inside)
    tl.store(sum_C_ptr + rows, sum_c, mask=inside)
    tl.store(target_logit_C_ptr + rows, logit_c, mask=inside)
    tl.store(nll_C_ptr + rows, target_nll(distance_c, sum_c, total_c), mask=inside)
    if smooth_nll_C_ptr is not None:
        lse_c = reference_c + tl.log(total_c)
        smooth_nll_c = lse_c * tl.load(total_weight_ptr) - smooth_c
        tl.store(smooth_nll_C_ptr + rows, smooth_nll_c, mask=inside)
    own_c = tl.load(own_KC_ptr + rows, mask=inside, other=0.0)
    shift_c = tl.where(own_c == -INFINITY, -INFINITY, own_c - reference_c)
    tl.store(factor_C_ptr + rows, tl.exp(shift_c), mask=inside)


def first_references(logit_C: Tensor, sampled_C: Tensor, row: RowCoefs) -> Tensor:
    reference_C, C = sampled_C.new_empty(sampled_C.shape), sampled_C.shape[0]
    _first_references_kernel[(cdiv(C, BLOCK_C),)](
        logit_C, sampled_C, row.target_N, row.ignored_N, reference_C, C, BLOCK_C=BLOCK_C
    )
    return reference_C


def pack(
    part: ExcludedTargetStats, logit_C: Tensor, row: RowCoefs, first_class: int, smooth_logit_C: Tensor | None
) -> Tensor:
    C = logit_C.shape[0]
    own_KC = logit_C.new_empty(3 if smooth_logit_C is None else 4, C)
    _pack_kernel[(cdiv(C, BLOCK_C),)](
        part.max_N, part.sum_N, logit_C, row.target_N, row.ignored_N, smooth_logit_C, own_KC, C,
        BLOCK_C=BLOCK_C,
    )  # fmt: skip
    return own_KC


def merge(
    out: ExcludedTargetStats, parts_PKC: Tensor, own_KC: Tensor, row: RowCoefs, total_weight: Tensor | int
) -> Tensor:
    P, K, C = parts_PKC.shape
    factor_C = own_KC.new_empty(C)
    if out.smooth_nll_N is not None and isinstance(total_weight, int):
        total_weight = own_KC.new_full((), total_weight)
    _merge_kernel[(cdiv(C, BLOCK_C),)](
        parts_PKC, own_KC, row.ignored_N, None if out.smooth_nll_N is None else total_weight, out.max_N,
        out.sum_N, out.target_logit_N, out.nll_N, out.smooth_nll_N, factor_C, P, K, C, BLOCK_C=BLOCK_C,
    )  # fmt: skip
    return factor_C
