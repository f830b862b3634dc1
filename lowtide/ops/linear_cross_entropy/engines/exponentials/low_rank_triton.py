"""Form both GEMMs of a narrow term with the exponentials, in one Triton kernel.

Each of them takes as long as reading the exponentials, so these are read once for both.

Shapes: C tokens of a chunk, or of a part of it, V classes, R features, at most NARROW; S strips of
classes; lower case = one tile, v of the first half of a strip, o of the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import reduce
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe
from lowtide.ops.linear_cross_entropy.planning.byte_counts import NARROW, STRIP

# Rows of a tile of exponentials. A strip is two tiles wide, because the box of a tensor map has at
# most 256 elements a side.
BLOCK_C = 64
STAGES, WARPS = 3, 4


@triton.jit
def _load_features(ptr, rows, stride, count, R: tl.constexpr, BLOCK_R: tl.constexpr):
    """Load rows of features as a tile, with zeros beyond the last row and feature."""
    columns = tl.arange(0, BLOCK_R)
    mask = (rows[:, None] < count) & (columns[None, :] < R)
    return tl.load(ptr + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _store_features(ptr, value, rows, count, R: tl.constexpr, ADD: tl.constexpr):
    """Store rows of features, or add them to what is there."""
    columns = tl.arange(0, value.shape[1])
    mask = (rows[:, None] < count) & (columns[None, :] < R)
    place = rows[:, None].to(tl.int64) * R + columns[None, :]
    if ADD:
        value += tl.load(ptr + place, mask=mask, other=0.0)
    tl.store(ptr + place, value, mask=mask)


@triton.jit
def _narrow_products_kernel(
    exp_CV,
    x_CR_ptr,
    weight_VR_ptr,
    partial_SCR_ptr,
    sum_VR_ptr,
    weight_stride,
    C,
    V,
    R: tl.constexpr,
    X_STRIDE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """sum (+)= exp^T x, and for each strip of classes its part of exp weight.

    Grid: one program per strip, which goes through all rows.
    """
    strip = tl.program_id(0)
    first = strip * 2 * BLOCK_V
    classes = first + tl.arange(0, BLOCK_V)
    others = classes + BLOCK_V
    weight_vr = _load_features(weight_VR_ptr, classes, weight_stride, V, R, BLOCK_R)
    weight_or = _load_features(weight_VR_ptr, others, weight_stride, V, R, BLOCK_R)
    sum_vr, sum_or = tl.zeros((BLOCK_V, BLOCK_R), tl.float32), tl.zeros((BLOCK_V, BLOCK_R), tl.float32)
    part_CR_ptr = partial_SCR_ptr + strip.to(tl.int64) * C * R
    for start in range(0, C, BLOCK_C):
        rows = start + tl.arange(0, BLOCK_C)
        x_cr = _load_features(x_CR_ptr, rows, X_STRIDE, C, R, BLOCK_R)
        exp_cv, exp_co = exp_CV.load([start, first]), exp_CV.load([start, first + BLOCK_V])
        # The other product comes last, because the kernel waits for it. With an unfinished
        # accumulator at the end of a step, ptxas would wait after each of its instructions.
        sum_vr, sum_or = tl.dot(exp_cv.T, x_cr, sum_vr), tl.dot(exp_co.T, x_cr, sum_or)
        part_cr = tl.dot(exp_co, weight_or, tl.dot(exp_cv, weight_vr))
        _store_features(part_CR_ptr, part_cr, rows, C, R, ADD=False)
    _store_features(sum_VR_ptr, sum_vr, classes, V, R, ADD)
    _store_features(sum_VR_ptr, sum_or, others, V, R, ADD)


def products(
    product_CR: Tensor, sum_VR: Tensor, exp_CV: Tensor, x_CR: Tensor, weight_VR: Tensor, *, add: bool
) -> None:
    """Compute product = exp weight and sum (+)= exp^T x in float32, deterministically."""
    (C, V), R, block = exp_CV.shape, x_CR.shape[1], STRIP // 2
    strips = triton.cdiv(V, STRIP)
    partial_SCR = torch.empty(strips, C, R, dtype=product_CR.dtype, device=product_CR.device)
    _narrow_products_kernel[(strips,)](
        describe(exp_CV, BLOCK_C, block), x_CR, weight_VR, partial_SCR, sum_VR, weight_VR.stride(0), C, V,
        R=R, X_STRIDE=x_CR.stride(0), ADD=add, BLOCK_C=BLOCK_C, BLOCK_V=block, BLOCK_R=NARROW,
        num_stages=STAGES, num_warps=WARPS,
    )  # fmt: skip
    reduce(partial_SCR.view(strips, C * R), product_CR.view(-1))
