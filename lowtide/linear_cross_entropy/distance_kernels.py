"""The product of class probabilities (probabilities.py has the mathematics), whose tiles leave as distances
below the largest logit of a row: a Triton kernel and its launcher. distance_pass.py makes the gradient.

Shapes: C tokens of a chunk, D features, R of a second, narrow term; B classes; T parts of a row, the halves
of the product's tiles, with 4 numbers each: the largest z, and the sums of exp(-d), y and y d; lower case =
one tile, h a half of its classes, q a quarter.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.linear_cross_entropy import exponential_kernels as tiles
from lowtide.linear_cross_entropy.exponential_kernels import LOG2_E, halves, product_of_tile, tile_at
from lowtide.linear_cross_entropy.rows import Columns

# Of a distance, to 1; the last of 2^16 numbers is infinity.
STEPS, FURTHEST = tl.constexpr(1024.0), tl.constexpr(65535)
# Adding it leaves a whole number in the lowest bits.
WHOLE = tl.constexpr(8388608.0)
# A distance whose exponential is 0, and which times 0 is 0.
NOTHING = tl.constexpr(200.0)


@triton.jit
def inside(columns, B, CUT: tl.constexpr):
    """Which columns there are. All of them, if that is known, is a constant: masks of it cost nothing."""
    return columns < B if CUT else tl.full(columns.shape, True, tl.int1)


@triton.jit
def load_soft(ptrs, stride, columns, mask):
    """The class probabilities of rows that begin at ptrs."""
    return tl.load(ptrs + columns.to(tl.int64) * stride, mask=mask, other=0.0)


@triton.jit
def smoothed(soft, class_weight_ptr, keep, floor, columns, mask, SMOOTHED: tl.constexpr):
    """Class probabilities, times the class weights."""
    soft = soft.to(tl.float32)
    if SMOOTHED:
        soft = tl.where(mask, soft * keep + floor, 0.0)
    if class_weight_ptr is not None:
        soft *= tl.load(class_weight_ptr + columns, mask=mask, other=0.0)
    return soft


@triton.jit
def _distances_kernel(
    x_CD, weight_BD, x_CR, weight_BR, distance_CB, bias_B_ptr, scale_ptr, soft_CB_ptr, class_weight_B_ptr,
    found_CT4_ptr, C, B, D, T, soft_row_stride, soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, STORE: tl.constexpr, PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of each row and half a tile, in float32: the largest z; with d = largest - z the sum of exp(-d);
    the sums of y and of y d. And d itself, in 16 bits if its place is no wider. Grid: one program a
    multiprocessor, tiles in turn."""
    tiles_c, tiles_b = tl.cdiv(C, BLOCK_C), tl.cdiv(B, BLOCK_B)
    scale = 1.0
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    for tile in tl.range(tl.program_id(0), tiles_c * tiles_b, PROGRAMS, flatten=True):
        tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        rows = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        soft_ptrs = soft_CB_ptr + (rows.to(tl.int64) * soft_row_stride)[:, None]
        u_cb = product_of_tile(x_CD, weight_BD, x_CR, weight_BR, tile_c, tile_b, D, BLOCK_C, BLOCK_B, BLOCK_D)
        halves_ch = halves(u_cb)
        for half in tl.static_range(2):
            z_ch = halves_ch[half]
            first = tile_b * BLOCK_B + half * (BLOCK_B // 2)
            columns = (first + tl.arange(0, BLOCK_B // 2))[None, :]
            beyond = first + BLOCK_B // 2 > B
            # In two parts: what has been joined takes the product's layout, one tile would impose its own.
            left = (first + tl.arange(0, BLOCK_B // 4))[None, :]
            right = left + BLOCK_B // 4
            left_cq = load_soft(soft_ptrs, soft_stride, left, (rows < C)[:, None] & (left < B))
            right_cq = load_soft(soft_ptrs, soft_stride, right, (rows < C)[:, None] & (right < B))
            soft_ch = tl.reshape(tl.permute(tl.join(left_cq, right_cq), (0, 2, 1)), (BLOCK_C, BLOCK_B // 2))
            if bias_B_ptr is not None:
                z_ch += tl.load(bias_B_ptr + columns, mask=columns < B, other=0.0)
            if scale_ptr is not None:
                z_ch *= scale
            if beyond:
                z_ch = tl.where(columns < B, z_ch, -float("inf"))
            max_c = tl.max(z_ch, 1)
            distance_ch = tl.where(max_c == -float("inf"), 0.0, max_c)[:, None] - z_ch
            if beyond:
                distance_ch = tl.where(columns < B, distance_ch, NOTHING)
            if STORE:
                stored_ch = distance_ch
                if distance_CB.dtype == tl.int16:
                    whole_ch = tl.minimum(tl.fma(distance_ch, STEPS, WHOLE), WHOLE + FURTHEST)
                    stored_ch = (whole_ch.to(tl.int32, bitcast=True) & FURTHEST).to(tl.int16)
                distance_CB.store([tile_c * BLOCK_C, first], stored_ch)
            sum_c = tl.sum(tl.exp2(distance_ch * -LOG2_E), 1)
            soft_ch = smoothed(soft_ch, class_weight_B_ptr, keep, floor, columns, columns < B, SMOOTHED)
            mass_c, cross_c = tl.sum(soft_ch, 1), tl.sum(soft_ch * distance_ch, 1)
            # All four at once: each store of rows has to go through shared memory.
            found_c4 = tl.reshape(tl.join(tl.join(max_c, mass_c), tl.join(sum_c, cross_c)), (BLOCK_C, 4))
            part = rows.to(tl.int64) * T + 2 * tile_b + half
            ptrs = found_CT4_ptr + 4 * part[:, None] + tl.arange(0, 4)[None, :]
            tl.store(ptrs, found_c4, mask=(rows < C)[:, None])


def distances(terms: Sequence[tuple[Tensor, Tensor]], columns: Columns, out_CV: Tensor | None) -> Tensor:
    """What the gradient's kernels want to know of each part of a row, [C, T, 4]; and the distances, where
    there is a place for them."""
    (x_CD, weight_VD), *others = (tiles.described(term) for term in terms)
    x_CR, weight_VR = others[0] if others else (None, None)
    soft: Any = columns.soft_CB
    (C, D), V = terms[0][0].shape, terms[0][1].shape[0]
    T, programs = 2 * triton.cdiv(V, tiles.BLOCK_B), tiles.multiprocessors(terms[0][0].device)
    found_CT4 = torch.empty(C, T, 4, dtype=torch.float32, device=terms[0][0].device)
    out = (
        None
        if out_CV is None
        else tiles.describe(place_of_distances(out_CV), tiles.BLOCK_C, tiles.BLOCK_B // 2)
    )
    _distances_kernel[(programs,)](
        x_CD, weight_VD, x_CR, weight_VR, out, columns.bias_B, columns.scale, soft,
        columns.class_weight_B, found_CT4, C, V, D, T, *soft.stride(), *columns.smoothing,
        SMOOTHED=columns.smoothing != (1, 0), STORE=out is not None, PROGRAMS=programs, GROUP=tiles.GROUP,
        BLOCK_C=tiles.BLOCK_C, BLOCK_B=tiles.BLOCK_B, BLOCK_D=tiles.BLOCK_D,
        num_stages=tiles.STAGES - (not _loads_wide(soft)), num_warps=tiles.WARPS,
    )  # fmt: skip
    return found_CT4


def _loads_wide(soft: Tensor) -> bool:
    """Whether a thread loads several at once. If not, Triton turns whole float32 tiles around, in as much
    shared memory as a stage takes."""
    row, column = soft.stride()
    return column == 1 and row % 16 == 0 and soft.data_ptr() % 16 == 0


def place_of_distances(grad_CV: Tensor) -> Tensor:
    """The memory of a gradient, as what it holds before: whole numbers, where that is half precision."""
    return grad_CV.view(torch.int16) if grad_CV.dtype.itemsize == 2 else grad_CV
