"""The product of class probabilities (engine.py has the mathematics), whose tiles leave as distances
below the largest logit of a row: a Triton kernel and its launcher. gemm_gluon.py has one in Gluon,
with the same arithmetic, for Hopper cards and probabilities whose rows lie as a tensor map wants them.
softmax_triton.py makes the gradient.

Shapes: C tokens of a chunk, D features, R of a second, narrow term; B classes; T parts of a row, the halves
of the product's tiles, with 4 numbers each: the largest z, and the sums of y, exp(-d) and y d; lower case =
one tile, h a half of its classes. PTX: with instructions by hand, which Triton's interpreter does not know.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.exponentials import gemm_triton as tiles
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm_triton import LOG2_E
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe, halves, multiprocessors, tile_at
from lowtide.ops.linear_cross_entropy.engines.softmax_torch import Columns

# Of a distance, to 1; the last of 2^16 numbers is infinity.
STEPS, FURTHEST = tl.constexpr(1024.0), tl.constexpr(65535)  # decision 0018
# Adding it leaves a whole number in the lowest bits.
WHOLE = tl.constexpr(8388608.0)
# A distance whose exponential is 0, and which times 0 is 0.
NOTHING = tl.constexpr(200.0)


@triton.jit
def inside(columns, B, CUT: tl.constexpr):
    """Which columns there are. All of them, if that is known, is a constant: masks of it cost nothing."""
    return columns < B if CUT else columns == columns


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
def _read(ptrs, z_ch, PTX: tl.constexpr):
    """Numbers that lie anywhere. In the layout of z_ch, which is named for no other reason: Triton would turn
    whole float32 tiles around, in as much shared memory as a stage takes."""
    if PTX:
        bits_ch = tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];", "=h,l,f", [ptrs.to(tl.int64), z_ch], tl.int16, is_pure=False, pack=1
        )
        return bits_ch.to(tl.bfloat16, bitcast=True)
    else:
        return tl.load(ptrs)


@triton.jit
def in_16_bits(distance_ch, PTX: tl.constexpr):
    """Cut off on the pipe of products, which has twice the lanes of that of minima. A NaN becomes some
    number: it is in its row's sums, and so in the whole row."""
    if PTX:
        share_ch = tl.inline_asm_elementwise(
            "mul.sat.f32 $0, $1, $2;", "=f,f,f", [distance_ch, STEPS / FURTHEST],
            tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        share_ch = tl.minimum(distance_ch * (STEPS / FURTHEST), 1.0)
    whole_ch = tl.fma(share_ch, FURTHEST * 1.0, WHOLE)
    return (whole_ch.to(tl.int32, bitcast=True) & FURTHEST).to(tl.int16)


@triton.jit
def _store_found(ptrs, max_c, sum_c, mass_c, cross_c, mask, PTX: tl.constexpr):
    """All four at once. A store of Triton's goes through shared memory; here the four lanes that know a row
    write the same 16 bytes."""
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5};"
            " mov.u32 $0, 0; }",
            "=r,l,f,f,f,f,r", [ptrs.to(tl.int64), max_c, sum_c, mass_c, cross_c, mask.to(tl.int32)],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        found_c4 = tl.reshape(tl.join(tl.join(max_c, mass_c), tl.join(sum_c, cross_c)), (max_c.shape[0], 4))
        tl.store(ptrs[:, None] + tl.arange(0, 4)[None, :], found_c4, mask=mask[:, None])


@triton.jit
def distances_below(z_ch, bias_B_ptr, scale, columns, mask):
    """The largest logit of each row of half a tile, and how far the others are below it."""
    if bias_B_ptr is not None:
        z_ch += tl.load(bias_B_ptr + columns, mask=mask, other=0.0)
    if scale is not None:
        z_ch *= scale
    z_ch = tl.where(mask, z_ch, -float("inf"))
    max_c = tl.max(z_ch, 1)
    distance_ch = tl.where(max_c == -float("inf"), 0.0, max_c)[:, None] - z_ch
    return max_c, tl.where(mask, distance_ch, NOTHING)


@triton.jit
def leave_sums(
    max_c, distance_ch, soft_ch, class_weight_B_ptr, found_ptrs, rows, columns, mask, C, keep, floor,
    SMOOTHED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    soft_ch = smoothed(soft_ch, class_weight_B_ptr, keep, floor, columns, mask, SMOOTHED)
    mass_c, cross_c = tl.sum(soft_ch, 1), tl.sum(soft_ch * distance_ch, 1)
    sum_c = tl.sum(tl.exp2(distance_ch * -LOG2_E), 1)  # last: y's registers are free by then
    _store_found(found_ptrs, max_c, sum_c, mass_c, cross_c, rows < C, PTX)


@triton.jit
def _leave(
    z_ch, distance_CB, bias_B_ptr, scale, soft_CB_ptr, class_weight_B_ptr, found_ptrs, rows, first_row, first,
    C, B, soft_row_stride, soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, STORE: tl.constexpr, CUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What half a tile leaves."""
    columns = (first + tl.arange(0, z_ch.shape[1]))[None, :]
    mask = inside(columns, B, CUT)
    # Beyond the last row or class those of others.
    ptrs = soft_CB_ptr + (tl.minimum(rows, C - 1).to(tl.int64) * soft_row_stride)[:, None]
    there = tl.minimum(columns, B - 1) if CUT else columns
    soft_ch = tl.where(mask, _read(ptrs + there.to(tl.int64) * soft_stride, z_ch, PTX), 0.0)
    max_c, distance_ch = distances_below(z_ch, bias_B_ptr, scale, columns, mask)
    if STORE:
        if distance_CB.dtype == tl.int16:
            distance_CB.store([first_row, first], in_16_bits(distance_ch, PTX))
        else:
            distance_CB.store([first_row, first], distance_ch)
    leave_sums(
        max_c, distance_ch, soft_ch, class_weight_B_ptr, found_ptrs, rows, columns, mask, C, keep, floor,
        SMOOTHED, PTX,
    )  # fmt: skip


@triton.jit
def _distances_kernel(
    x_CD, weight_BD, x_CR, weight_BR, distance_CB, bias_B_ptr, scale_ptr, soft_CB_ptr, class_weight_B_ptr,
    found_CT4_ptr, C, B, D, T, soft_row_stride, soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, STORE: tl.constexpr, PTX: tl.constexpr,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of each row and half a tile, in float32: the largest z; with d = largest - z the sum of exp(-d);
    the sums of y and of y d. And d itself, in 16 bits if its place is no wider. Grid: one program a
    multiprocessor, tiles in turn.

    As one loop of all steps of all tiles: Triton 3.6, making one of two (flatten=True), fails at an `if` that
    is no choice between numbers."""
    tiles_c, tiles_b, steps = tl.cdiv(C, BLOCK_C), tl.cdiv(B, BLOCK_B), tl.cdiv(D, BLOCK_D)
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    tile, step = tl.program_id(0) - PROGRAMS, -1
    tile_c, tile_b = 0, 0
    u_cb = tl.zeros((BLOCK_C, BLOCK_B), tl.float32)
    for _ in range(0, tl.cdiv(tiles_c * tiles_b - tl.program_id(0), PROGRAMS) * steps):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            tile += PROGRAMS
            tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        x_cd = x_CD.load([tile_c * BLOCK_C, step * BLOCK_D])
        weight_bd = weight_BD.load([tile_b * BLOCK_B, step * BLOCK_D])
        u_cb = tl.dot(x_cd, weight_bd.T, u_cb)
        if step == steps - 1:
            first_row, first = tile_c * BLOCK_C, tile_b * BLOCK_B
            if x_CR is not None:
                x_cr, weight_br = x_CR.load([first_row, 0]), weight_BR.load([first, 0])
                u_cb = tl.dot(x_cr, weight_br.T, u_cb)
            rows = first_row + tl.arange(0, BLOCK_C)
            found_ptrs = found_CT4_ptr + 4 * (rows.to(tl.int64) * T + 2 * tile_b)
            halves_ch = halves(u_cb)  # here, so that the product is waited for once
            # The whole epilogue twice: a branch, where masks would be a choice for each number. And nothing
            # comes together behind it, which would let y's layout be the first.
            if first + BLOCK_B > B:
                for half in tl.static_range(2):
                    _leave(
                        halves_ch[half], distance_CB, bias_B_ptr, scale, soft_CB_ptr, class_weight_B_ptr,
                        found_ptrs + 4 * half, rows, first_row, first + half * (BLOCK_B // 2), C, B,
                        soft_row_stride, soft_stride, keep, floor, SMOOTHED, STORE, True, PTX,
                    )  # fmt: skip
            else:
                for half in tl.static_range(2):
                    _leave(
                        halves_ch[half], distance_CB, bias_B_ptr, scale, soft_CB_ptr, class_weight_B_ptr,
                        found_ptrs + 4 * half, rows, first_row, first + half * (BLOCK_B // 2), C, B,
                        soft_row_stride, soft_stride, keep, floor, SMOOTHED, STORE, False, PTX,
                    )  # fmt: skip
            u_cb = tl.zeros((BLOCK_C, BLOCK_B), tl.float32)


def distances(terms: Sequence[tuple[Tensor, Tensor]], columns: Columns, out_CV: Tensor | None) -> Tensor:
    """What the gradient's kernels want to know of each part of a row, [C, T, 4]; and the distances, where
    there is a place for them."""
    (x_CD, weight_VD), *others = (tiles.described(term) for term in terms)
    x_CR, weight_VR = others[0] if others else (None, None)
    soft: Any = columns.soft_CB
    (C, D), V = terms[0][0].shape, terms[0][1].shape[0]
    T, programs = 2 * triton.cdiv(V, tiles.BLOCK_B), multiprocessors(soft.device)
    found_CT4 = torch.empty(C, T, 4, dtype=torch.float32, device=soft.device)
    out = None if out_CV is None else describe(place_of_distances(out_CV), tiles.BLOCK_C, tiles.BLOCK_B // 2)
    row_stride, stride = soft.stride()
    _distances_kernel[(programs,)](
        x_CD, weight_VD, x_CR, weight_VR, out, columns.bias_B, columns.scale, soft,
        columns.class_weight_B, found_CT4, C, V, D, T, row_stride, stride, *columns.smoothing,
        SMOOTHED=columns.smoothing != (1, 0), STORE=out is not None, PTX=soft.is_cuda,
        PROGRAMS=programs, GROUP=tiles.GROUP,
        BLOCK_C=tiles.BLOCK_C, BLOCK_B=tiles.BLOCK_B, BLOCK_D=tiles.BLOCK_D,
        num_stages=tiles.STAGES, num_warps=tiles.WARPS,
    )  # fmt: skip
    return found_CT4


def place_of_distances(grad_CV: Tensor) -> Tensor:
    """The memory of a gradient, as what it holds before: whole numbers, where that is half precision."""
    return grad_CV.view(torch.int16) if grad_CV.dtype.itemsize == 2 else grad_CV
