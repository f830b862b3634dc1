"""Compute row statistics from partial results, then turn distances into the gradient in place.

The kernel of gemm_triton.py or gemm_gluon.py has computed the partial results and the distances.

Shapes: C tokens of a chunk; B classes; T parts of a row, with 4 numbers each; t parts and h classes
of each in one block.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv, next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs, SoftmaxStats, TileColumns
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import whole_softmax_coef
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import LOG2_E
from lowtide.ops.linear_cross_entropy.engines.soft_targets.gemm_triton import (
    FURTHEST,
    STEPS,
    WHOLE,
    inside,
    load_soft,
    place_of_distances,
    smoothed,
)

# Classes and warps of a program. A thread has so few classes that all its loads are in flight at
# once. It needs only 32 registers, so that a multiprocessor has full occupancy.
BLOCK, WARPS = 2048, 8  # decision 0042
# ORed with a whole number below 2^23, these bits give the float32 of that number plus WHOLE.
WHOLE_BITS = tl.constexpr(0x4B000000)


@remember_launches
@triton.jit
def _rows_kernel(
    partials_CT4_ptr, soft_target_coef_C_ptr, lse_coef_C_ptr, max_C_ptr, sum_C_ptr, soft_mass_C_ptr,
    soft_nll_C_ptr, T,
    GRADIENT: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of each row. Grid: (C,).

    For the gradient each part gets a factor, by which its exponentials are multiplied. The factors
    overwrite the first T of the row's 4 T numbers. There they are contiguous, so
    `_gradient_kernel` reads only a quarter of the memory.
    """
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    row_ptr = partials_CT4_ptr + row * T * 4
    partials_t4 = tl.load(
        row_ptr + part[:, None] * 4 + tl.arange(0, 4)[None, :], mask=part[:, None] < T, other=0.0
    )
    first_t2, second_t2 = tl.split(tl.reshape(partials_t4, (PARTS, 2, 2)))
    max_t, soft_mass_t = tl.split(first_t2)
    sum_t, soft_nll_t = tl.split(second_t2)
    max_t = tl.where(part < T, max_t, -float("inf"))
    row_max = tl.max(max_t, 0)
    share_t = tl.exp(max_t - row_max)
    row_sum, soft_mass = tl.sum(sum_t * share_t, 0), tl.sum(soft_mass_t, 0)
    log_sum = tl.log(row_sum)
    if max_C_ptr is not None:
        shift_t = tl.where(max_t == -float("inf"), 0.0, max_t) - row_max
        soft_nll = tl.sum(soft_nll_t + soft_mass_t * tl.where(part < T, log_sum - shift_t, 0.0), 0)
        tl.store(max_C_ptr + row, row_max)
        tl.store(sum_C_ptr + row, row_sum)
        tl.store(soft_mass_C_ptr + row, soft_mass)
        tl.store(soft_nll_C_ptr + row, soft_nll)
    if GRADIENT:
        lse_coef = None
        if lse_coef_C_ptr is not None:
            lse_coef = tl.load(lse_coef_C_ptr + row)
        softmax_coef = whole_softmax_coef(
            0.0, tl.load(soft_target_coef_C_ptr + row), soft_mass, lse_coef, row_max + log_sum
        )
        # All warps must have read the row before it is overwritten. The row has 4 T numbers, more
        # than PARTS, so the store needs no mask.
        tl.debug_barrier()
        tl.store(row_ptr + part, share_t * (softmax_coef / row_sum))


@triton.jit
def _put_gradient(
    distance_ptr, grad_ptr, soft_ptr, class_weight_B_ptr, factor_t, soft_target_coef, start, B,
    soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, CUT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of BLOCK classes of the row that begins at these pointers."""
    columns = start + tl.arange(0, BLOCK // WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    mask = inside(columns, B, CUT)
    distance_th = tl.load(distance_ptr + columns, mask=mask, other=0)
    soft_th = load_soft(soft_ptr, soft_stride, columns, mask)
    if distance_ptr.dtype.element_ty == tl.int16:
        bits_th = distance_th.to(tl.int32) & FURTHEST
        # Convert by bits: a conversion would take time of the unit that computes exponentials.
        steps_th = (bits_th | WHOLE_BITS).to(tl.float32, bitcast=True) - WHOLE
        exp_th = tl.where(bits_th < FURTHEST, tl.exp2(steps_th * (-LOG2_E / STEPS)), 0.0)
    else:
        exp_th = tl.exp2(distance_th * -LOG2_E)
    soft_th = smoothed(soft_th, class_weight_B_ptr, keep, floor, columns, mask, SMOOTHED)
    grad_th = exp_th * factor_t[:, None] - soft_target_coef * soft_th
    tl.store(grad_ptr + columns, grad_th.to(grad_ptr.dtype.element_ty), mask=mask)


@remember_launches
@triton.jit
def _gradient_kernel(
    partials_CT4_ptr, distance_CB_ptr, grad_CB_ptr, soft_CB_ptr, class_weight_B_ptr,
    soft_target_coef_C_ptr, B, T, stride,
    soft_row_stride, soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Overwrite a row's distances with its gradient. Grid: (C cdiv(B, BLOCK),), row by row.

    `_rows_kernel` has combined the row's partial results before.
    """
    blocks = tl.cdiv(B, BLOCK)
    row, start = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks * BLOCK
    part = start // WIDTH + tl.arange(0, BLOCK // WIDTH)
    factor_t = tl.load(partials_CT4_ptr + row * T * 4 + part, mask=part < T, other=0.0)
    soft_target_coef = tl.load(soft_target_coef_C_ptr + row)
    distance_ptr, grad_ptr = distance_CB_ptr + row * stride, grad_CB_ptr + row * stride
    soft_ptr = soft_CB_ptr + row * soft_row_stride
    if start + BLOCK > B:
        _put_gradient(
            distance_ptr, grad_ptr, soft_ptr, class_weight_B_ptr, factor_t, soft_target_coef, start, B,
            soft_stride, keep,
            floor, SMOOTHED, True, WIDTH, BLOCK,
        )  # fmt: skip
    else:
        _put_gradient(
            distance_ptr, grad_ptr, soft_ptr, class_weight_B_ptr, factor_t, soft_target_coef, start, B,
            soft_stride, keep,
            floor, SMOOTHED, False, WIDTH, BLOCK,
        )  # fmt: skip


def gradient(
    partials_CT4: Tensor,
    grad_CV: Tensor | None,  # None: statistics only
    coefs: RowCoefs,
    stats: SoftmaxStats,
    columns: TileColumns,
    *,
    take_stats: bool,
) -> None:
    """Write the row statistics and the gradient; this overwrites the partial results."""
    C, T, _ = partials_CT4.shape
    stat: Any = [None] * 4
    if take_stats:
        stat = [stats.max_N, stats.sum_N, stats.soft_mass_N, stats.soft_nll_N]
    _rows_kernel[(C,)](
        partials_CT4, coefs.soft_target_coef_N, coefs.lse_coef_N, *stat, T,
        GRADIENT=grad_CV is not None, PARTS=next_power_of_2(T),
    )  # fmt: skip
    if grad_CV is None:
        return
    soft: Any = columns.soft_CB
    V = soft.shape[1]
    _gradient_kernel[(C * cdiv(V, BLOCK),)](
        partials_CT4, place_of_distances(grad_CV), grad_CV, soft, columns.class_weight_B,
        coefs.soft_target_coef_N, V, T,
        grad_CV.stride(0), *soft.stride(), *columns.smoothing, SMOOTHED=columns.smoothing != (1, 0),
        WIDTH=tiles.BLOCK_B // 2, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
