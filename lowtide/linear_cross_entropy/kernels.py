"""The pass over a tile of logits as one Triton kernel; rows.py has the mathematics, and the same in torch.

A program takes a row. It reads the float32 logits once for their maximum and sum of exponentials, and once
more to write the gradient, from the last class to the first: what it read last is still in the L2 cache. A
half-precision gradient is written into the second half of its own row of float32 logits, so that no write,
going backwards, reaches a logit that is still to be read.

Shapes: C rows and B columns of one tile (B = V, all classes, wherever statistics are taken).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.linear_cross_entropy.rows import Statistics, Terms

# Logits to the tile; with bias, smoothing and class weights half as many, which is what the registers hold.
BLOCK, BLOCK_WITH_OPTIONS = 16384, 8192
WARPS = 16

# Finite, so that exp(LOWEST - z) is 0 and not NaN before the first logit is seen.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _load_logits(logits_ptr, bias_ptr, columns, B, HAS_BIAS: tl.constexpr):
    z_b = tl.load(logits_ptr + columns, mask=columns < B, other=-float("inf"))
    if HAS_BIAS:
        z_b += tl.load(bias_ptr + columns, mask=columns < B, other=0.0)
    return z_b


@triton.jit
def _max_and_sum(logits_ptr, bias_ptr, B, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """max z and sum exp(z - max), online: each lane keeps its own, and takes one exponential a logit."""
    max_b = tl.full([BLOCK], LOWEST, tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    for start in range(0, B, BLOCK):
        z_b = _load_logits(logits_ptr, bias_ptr, start + tl.arange(0, BLOCK), B, HAS_BIAS)
        ratio_b = tl.exp(-tl.abs(z_b - max_b))
        sum_b = tl.where(z_b > max_b, sum_b * ratio_b + 1.0, sum_b + ratio_b)
        max_b = tl.maximum(max_b, z_b)
    row_max = tl.max(max_b, 0)
    return row_max, tl.sum(sum_b * tl.exp(max_b - row_max), 0)


@triton.jit
def _softmax_gradient_kernel(
    logits_CB_ptr,
    grad_CB_ptr,
    target_C_ptr,
    pull_C_ptr,
    hit_C_ptr,
    spread_C_ptr,
    max_C_ptr,
    sum_C_ptr,
    gap_C_ptr,
    smooth_C_ptr,
    bias_B_ptr,
    class_weight_B_ptr,
    B,
    first_class,
    logits_stride,
    grad_stride,
    TAKE_STATISTICS: tl.constexpr,
    GRADIENT: tl.constexpr,
    SMOOTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CLASS_WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr = logits_CB_ptr + row * logits_stride
    grad_ptr = grad_CB_ptr + row * grad_stride
    pull = tl.load(pull_C_ptr + row)
    ignored = pull == 0.0
    classes = tl.where(ignored, 0, B)  # an ignored row's logits are not read, NaN or not
    target = (tl.load(target_C_ptr + row) - first_class).to(tl.int32)

    if TAKE_STATISTICS:
        row_max, row_sum = _max_and_sum(logits_ptr, bias_B_ptr, classes, HAS_BIAS, BLOCK)
        row_max, row_sum = tl.where(ignored, 0.0, row_max), tl.where(ignored, 1.0, row_sum)
        target_logit = tl.load(logits_ptr + target)
        if HAS_BIAS:
            target_logit += tl.load(bias_B_ptr + target)
        log_sum = tl.log(row_sum)
        tl.store(max_C_ptr + row, row_max)
        tl.store(sum_C_ptr + row, row_sum)
        tl.store(gap_C_ptr + row, log_sum - (target_logit - row_max))
    else:
        row_max, row_sum = tl.load(max_C_ptr + row), tl.load(sum_C_ptr + row)
        log_sum = tl.log(row_sum)

    if GRADIENT or SMOOTH:
        hit = tl.load(hit_C_ptr + row)
        scale = pull / row_sum
        spread = tl.load(spread_C_ptr + row) if SMOOTH else 0.0
        smooth_b = tl.zeros([BLOCK], tl.float32)
        blocks = tl.cdiv(B, BLOCK)
        tl.debug_barrier()
        for step in range(blocks):
            columns = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)
            z_b = _load_logits(logits_ptr, bias_B_ptr, columns, classes, HAS_BIAS)
            grad_b = tl.exp(z_b - row_max) * scale
            grad_b = tl.where(columns == target, grad_b - hit, grad_b)
            if SMOOTH:
                class_weight_b = tl.full([BLOCK], 1.0, tl.float32)
                if HAS_CLASS_WEIGHT:
                    class_weight_b = tl.load(class_weight_B_ptr + columns, mask=columns < B, other=0.0)
                grad_b -= spread * class_weight_b
                if TAKE_STATISTICS:
                    gap_b = tl.where(columns < classes, log_sum - (z_b - row_max), 0.0)
                    smooth_b += class_weight_b * gap_b
            if GRADIENT:
                tl.debug_barrier()  # every thread has its logits before any writes over them
                tl.store(
                    grad_ptr + columns,
                    grad_b.to(grad_CB_ptr.dtype.element_ty),
                    mask=columns < B,
                )
        if SMOOTH and TAKE_STATISTICS:
            tl.store(smooth_C_ptr + row, tl.sum(smooth_b, 0))


def softmax_gradient_(
    logits_CB: Tensor,
    terms: Terms,
    statistics: Statistics,
    *,
    take_statistics: bool,
    gradient_dtype: torch.dtype | None,  # None: statistics alone
    bias_B: Tensor | None,
    class_weight_B: Tensor | None,
    first_class: int = 0,
) -> Tensor | None:  # [C, B]
    C, B = logits_CB.shape
    grad_CB = logits_CB if gradient_dtype is None else gradient_view(logits_CB, gradient_dtype)
    plain = bias_B is None and terms.spread_N is None
    block = min(BLOCK if plain else BLOCK_WITH_OPTIONS, triton.next_power_of_2(B))
    if C:
        _softmax_gradient_kernel[(C,)](
            logits_CB,
            grad_CB,
            terms.target_N,
            terms.pull_N,
            terms.hit_N,
            terms.spread_N,
            statistics.max_N,
            statistics.sum_N,
            statistics.gap_N,
            statistics.smooth_N,
            bias_B,
            class_weight_B,
            B,
            first_class,
            logits_CB.stride(0),
            grad_CB.stride(0),
            TAKE_STATISTICS=take_statistics,
            GRADIENT=gradient_dtype is not None,
            SMOOTH=terms.spread_N is not None,
            HAS_BIAS=bias_B is not None,
            HAS_CLASS_WEIGHT=class_weight_B is not None,
            BLOCK=block,
            num_warps=WARPS if block >= 4096 else 4,
        )
    return None if gradient_dtype is None else grad_CB


@triton.jit
def _scale_kernel(tensor_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scaled = tl.load(tensor_ptr + offsets, mask=offsets < count).to(tl.float32) * tl.load(factor_ptr)
    tl.store(out_ptr + offsets, scaled.to(out_ptr.dtype.element_ty), mask=offsets < count)


def scale_into(out: Tensor, tensor: Tensor, factor: Tensor) -> None:
    """out = factor * tensor in float32, rounded once; both contiguous, and out may be tensor itself."""
    count, block = tensor.numel(), 4096
    if count:
        _scale_kernel[(triton.cdiv(count, block),)](tensor, factor, out, count, BLOCK=block, num_warps=8)


def gradient_view(logits_CB: Tensor, dtype: torch.dtype) -> Tensor:
    """Where the gradient goes: over the logits, or into the second half of each row if it is half as wide."""
    if dtype == logits_CB.dtype:
        return logits_CB
    halves = logits_CB.view(dtype)
    stride = logits_CB.stride(0)
    return halves.as_strided(logits_CB.shape, (2 * stride, 1), halves.storage_offset() + stride)
