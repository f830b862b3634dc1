"""Compute the row statistics of a tile of logits and its gradient in place, as one Triton kernel.

row_math.py has the formulas, softmax_torch.py has the same function in torch.

Each program handles one row. It reads the float32 logits once for their maximum and the sum of
exponentials. It reads them a second time to write the gradient and to compute any other sums. The
second read goes from the last class to the first, because the last logits of the first read are
still in the L2 cache. A half-precision gradient is written into the second half of its own row of
float32 logits. Since it is written backwards, it overwrites no logit that is still to be read.

Shapes: C rows and B columns of one tile, whose statistics are those of the tile's classes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.elementwise import add_row_sum
from lowtide.core.kernels.backend import next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs, SoftmaxStats, TileColumns
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import (
    slope_of,
    target_nll,
    target_numerator,
    transformed,
    whole_softmax_coef,
)

# Logits per step of a program, and its warps (decision 0076): the most threads that there can be,
# since an AMD warp has 64. With most options, which take registers, and in shorter rows, a step has
# fewer logits.
BLOCK, WARPS = 16384, 16 if torch.version.hip else 32
SMALL_BLOCK, WARPS_OF_SMALL_BLOCK = 4096, 16

# Finite, so that exp(LOWEST - z) is 0 and not NaN before the first logit is read.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def load_logits(logits_ptr, bias_ptr, scale, columns, B, SOFTCAP: tl.constexpr):
    """Return the logits z, the numbers u that they are computed from, and the slope dz/du / scale.

    u includes the bias. z is -inf beyond column B.
    """
    raw_b = tl.load(logits_ptr + columns, mask=columns < B, other=0.0)
    if bias_ptr is not None:
        raw_b += tl.load(bias_ptr + columns, mask=columns < B, other=0.0)
    z_b, bend_b = transformed(raw_b, scale, SOFTCAP, True)
    slope_b = slope_of(bend_b, SOFTCAP, True)
    return tl.where(columns < B, z_b, -float("inf")), raw_b, slope_b


@triton.jit
def max_and_sum(logits_ptr, bias_ptr, scale, B, excluded, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Return max z and sum exp(z - max) of all columns but an excluded one, in a single pass.

    Each lane keeps its own maximum and sum, and computes one exponential per logit.
    """
    max_b = tl.full([BLOCK], LOWEST, tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    for start in range(0, B, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        z_b, _, _ = load_logits(logits_ptr, bias_ptr, scale, columns, B, SOFTCAP)
        if excluded is not None:
            z_b = tl.where(columns == excluded, -float("inf"), z_b)
        ratio_b = tl.exp(-tl.abs(z_b - max_b))
        sum_b = tl.where(z_b > max_b, sum_b * ratio_b + 1.0, sum_b + ratio_b)
        max_b = tl.maximum(max_b, z_b)
    row_max = tl.max(max_b, 0)
    return row_max, tl.sum(sum_b * tl.exp(max_b - row_max), 0)


@triton.jit
def _load_soft(soft_ptr, class_weight_ptr, stride, keep, floor, columns, B):
    """Return the smoothed class probabilities, times the class weights."""
    soft_b = tl.load(soft_ptr + columns.to(tl.int64) * stride, mask=columns < B, other=0.0).to(tl.float32)
    soft_b = soft_b * keep + floor
    if class_weight_ptr is not None:
        soft_b *= tl.load(class_weight_ptr + columns, mask=columns < B, other=0.0)
    return tl.where(columns < B, soft_b, 0.0)


# Triton must not know that strides are multiples of 16. It would give each thread vectors, and read
# them number by number, in twice the time, if the end of the rows cuts one (decision 0076).
@remember_launches
@triton.jit(do_not_specialize=["logits_stride", "grad_stride", "soft_row_stride"])
def _softmax_gradient_kernel(
    logits_CB_ptr,
    grad_CB_ptr,
    target_C_ptr,
    ignored_C_ptr,
    softmax_coef_C_ptr,
    target_coef_C_ptr,
    smoothing_coef_C_ptr,
    soft_target_coef_C_ptr,
    lse_coef_C_ptr,
    entropy_coef_C_ptr,
    max_C_ptr,
    sum_C_ptr,
    nll_C_ptr,
    smooth_nll_C_ptr,
    soft_mass_C_ptr,
    soft_nll_C_ptr,
    mean_C_ptr,
    argmax_C_ptr,
    grad_dot_logit_C_ptr,
    bias_B_ptr,
    class_weight_B_ptr,
    soft_CB_ptr,
    scale_ptr,
    B,
    first_class,
    logits_stride,
    grad_stride,
    soft_row_stride,
    soft_stride,
    keep,
    floor,
    SOFTCAP: tl.constexpr,
    TAKE_STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    SECOND_READ: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the row statistics, the gradient, or both. Grid: one program per row.

    The vectors are the fields of RowCoefs and SoftmaxStats, in order; row_math.py explains them. A
    vector that is not wanted, or has no part in this call, is None.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr = logits_CB_ptr + row * logits_stride
    grad_ptr = grad_CB_ptr + row * grad_stride
    soft_ptr = logits_ptr
    if soft_CB_ptr is not None:
        soft_ptr = soft_CB_ptr + row * soft_row_stride
    ignored = tl.load(ignored_C_ptr + row)
    classes = tl.where(ignored, 0, B)  # an ignored row's logits are not read, since they may be NaN
    target = (tl.load(target_C_ptr + row) - first_class).to(tl.int32)
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)

    # Take the sum without the target: a confident target would cost the other terms their digits.
    EXCLUDES: tl.constexpr = TAKE_STATISTICS and nll_C_ptr is not None
    others, exp_target = 0.0, 0.0
    if EXCLUDES:
        row_max, others = max_and_sum(logits_ptr, bias_B_ptr, scale, classes, target, SOFTCAP, BLOCK)
        logit, _, _ = load_logits(logits_ptr, bias_B_ptr, scale, target + tl.arange(0, 1), B, SOFTCAP)
        largest, row_max = row_max, tl.maximum(row_max, tl.sum(logit, 0))
        others *= tl.exp(largest - row_max)
        distance = row_max - tl.sum(logit, 0)
        exp_target = tl.exp(-distance)
        row_sum = others + exp_target
        tl.store(nll_C_ptr + row, target_nll(distance, others, row_sum))
        others, exp_target = tl.where(ignored, 0.0, others), tl.where(ignored, 0.0, exp_target)
    elif TAKE_STATISTICS:
        row_max, row_sum = max_and_sum(logits_ptr, bias_B_ptr, scale, classes, None, SOFTCAP, BLOCK)
    else:
        row_max, row_sum = tl.load(max_C_ptr + row), tl.load(sum_C_ptr + row)
    row_max, row_sum = tl.where(ignored, 0.0, row_max), tl.where(ignored, 1.0, row_sum)
    if TAKE_STATISTICS:
        tl.store(max_C_ptr + row, row_max)
        tl.store(sum_C_ptr + row, row_sum)
    log_sum = tl.log(row_sum)

    if SECOND_READ:
        soft_mass = 0.0
        if soft_CB_ptr is not None:
            if TAKE_STATISTICS:
                for start in range(0, B, BLOCK):
                    columns = start + tl.arange(0, BLOCK)
                    soft_mass += tl.sum(
                        _load_soft(soft_ptr, class_weight_B_ptr, soft_stride, keep, floor, columns, B), 0
                    )
                tl.store(soft_mass_C_ptr + row, soft_mass)
            else:
                soft_mass = tl.load(soft_mass_C_ptr + row)
        soft_target_coef = None
        lse_coef = None
        if soft_target_coef_C_ptr is not None:
            soft_target_coef = tl.load(soft_target_coef_C_ptr + row)
        if lse_coef_C_ptr is not None:
            lse_coef = tl.load(lse_coef_C_ptr + row)
        softmax_coef = whole_softmax_coef(
            tl.load(softmax_coef_C_ptr + row), soft_target_coef, soft_mass, lse_coef, row_max + log_sum
        )
        target_coef, slant = tl.load(target_coef_C_ptr + row), softmax_coef / row_sum
        at_target = target_numerator(softmax_coef, target_coef, exp_target, others) / row_sum
        smooth_nll, soft_nll, mean, grad_dot_logit, best = 0.0, 0.0, 0.0, 0.0, B
        blocks = tl.cdiv(B, BLOCK)
        tl.debug_barrier()
        for step in range(blocks):
            columns = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
            z_b, raw_b, slope_b = load_logits(logits_ptr, bias_B_ptr, scale, columns, classes, SOFTCAP)
            shift_b = z_b - row_max
            exp_b = tl.exp(shift_b)
            grad_b = exp_b * slant
            if EXCLUDES:
                grad_b = tl.where(columns == target, at_target, grad_b)
            if TAKE_STATISTICS and argmax_C_ptr is not None:
                # NaN counts as the largest, as in torch.
                best = tl.minimum(best, tl.min(tl.where((shift_b == 0.0) | (z_b != z_b), columns, B), 0))
            if entropy_coef_C_ptr is not None or mean_C_ptr is not None:
                finite_b = tl.where(shift_b == -float("inf"), 0.0, shift_b)
                if TAKE_STATISTICS:
                    mean += tl.sum(exp_b * finite_b, 0)
                if entropy_coef_C_ptr is not None:
                    grad_b += exp_b * finite_b * (tl.load(entropy_coef_C_ptr + row) / row_sum)
            if soft_CB_ptr is not None:
                soft_b = _load_soft(soft_ptr, class_weight_B_ptr, soft_stride, keep, floor, columns, B)
                if TAKE_STATISTICS:
                    soft_nll += tl.sum(tl.where(columns < classes, soft_b * (log_sum - shift_b), 0.0), 0)
                grad_b -= soft_target_coef * soft_b
            if smoothing_coef_C_ptr is not None:
                class_weight_b = tl.full([BLOCK], 1.0, tl.float32)
                if class_weight_B_ptr is not None:
                    class_weight_b = tl.load(class_weight_B_ptr + columns, mask=columns < B, other=0.0)
                grad_b -= tl.load(smoothing_coef_C_ptr + row) * class_weight_b
                if TAKE_STATISTICS:
                    nll_b = tl.where(columns < classes, log_sum - shift_b, 0.0)
                    smooth_nll += tl.sum(class_weight_b * nll_b, 0)
            if GRADIENT:
                if not EXCLUDES:
                    grad_b = tl.where(columns == target, grad_b - target_coef, grad_b)
                grad_b *= slope_b
                if grad_dot_logit_C_ptr is not None:
                    grad_dot_logit += tl.sum(tl.where(columns < classes, grad_b * raw_b, 0.0), 0)
                # All threads must have read their logits before any overwrites them.
                tl.debug_barrier()
                tl.store(grad_ptr + columns, grad_b.to(grad_CB_ptr.dtype.element_ty), mask=columns < B)
        if TAKE_STATISTICS:
            if smoothing_coef_C_ptr is not None:
                tl.store(smooth_nll_C_ptr + row, smooth_nll)
            if soft_CB_ptr is not None:
                tl.store(soft_nll_C_ptr + row, soft_nll)
            if mean_C_ptr is not None:
                tl.store(mean_C_ptr + row, mean / row_sum)
            if argmax_C_ptr is not None:
                tl.store(argmax_C_ptr + row, tl.where(ignored, -1, best).to(tl.int64))
        if grad_dot_logit_C_ptr is not None:
            tl.store(grad_dot_logit_C_ptr + row, grad_dot_logit)


def softmax_gradient_(
    logits_CB: Tensor,
    coefs: RowCoefs,
    stats: SoftmaxStats,
    columns: TileColumns,
    *,
    take_stats: bool,
    gradient_dtype: torch.dtype | None,  # None: statistics only
    keep_logits: bool = False,  # not needed: with statistics only, the logits are never overwritten
    bias_sum_B: Tensor | None = None,
) -> Tensor | None:  # [C, B]
    """Turn a tile of logits into its gradient in place, and compute the row statistics if asked.

    Add the sum of the gradient's rows, as rounded, to `bias_sum_B`, if given.
    """
    grad_CB = None if gradient_dtype is None else gradient_view(logits_CB, gradient_dtype)
    softmax_gradient_into(grad_CB, logits_CB, coefs, stats, columns, take_stats=take_stats)
    add_row_sum(bias_sum_B, grad_CB)
    return grad_CB


def softmax_gradient_into(
    grad_CB: Tensor | None,  # None: statistics only
    logits_CB: Tensor,
    coefs: RowCoefs,
    stats: SoftmaxStats,
    columns: TileColumns,
    *,
    take_stats: bool,
) -> None:
    """Write the gradient to grad_CB, and compute the row statistics if asked.

    grad_CB may be `gradient_view` of the logits.
    """
    C, B = logits_CB.shape
    gradient = grad_CB is not None
    grad_CB = logits_CB if grad_CB is None else grad_CB
    transform = columns.transform
    in_second_read = (coefs.smoothing_coef_N, coefs.soft_target_coef_N, stats.mean_N, stats.argmax_N)
    plain = (
        transform.bias_V is None and not transform.softcap and all(each is None for each in in_second_read)
    )
    block, warps = (BLOCK, WARPS) if plain and B >= BLOCK else (SMALL_BLOCK, WARPS_OF_SMALL_BLOCK)
    if next_power_of_2(B) < block:
        block, warps = next_power_of_2(B), 4
    soft_strides = (0, 0) if columns.soft_CB is None else columns.soft_CB.stride()
    if C:
        _softmax_gradient_kernel[(C,)](
            logits_CB,
            grad_CB,
            *coefs.vectors,
            *stats.vectors,
            transform.bias_V,
            columns.class_weight_B,
            columns.soft_CB,
            transform.scale,
            B,
            columns.first_class,
            logits_CB.stride(0),
            grad_CB.stride(0),
            *soft_strides,
            *columns.smoothing,
            SOFTCAP=transform.softcap,
            TAKE_STATISTICS=take_stats,
            GRADIENT=gradient,
            SECOND_READ=gradient or any(each is not None for each in in_second_read),
            BLOCK=block,
            num_warps=warps,
            # With fused multiply-adds, the soft cap's 1 - room would be rounded once in one read of
            # the logits and twice in the other. Then z - max would not be 0 at the maximum.
            enable_fp_fusion=transform.softcap == 0,
        )


def gradient_view(logits_CB: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient's memory: the logits' own, or the second half of each row of them."""
    if dtype == logits_CB.dtype:
        return logits_CB
    halves = logits_CB.view(dtype)
    stride = logits_CB.stride(0)
    return halves.as_strided(logits_CB.shape, (2 * stride, 1), halves.storage_offset() + stride)
