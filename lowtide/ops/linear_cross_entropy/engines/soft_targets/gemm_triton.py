"""Compute distances in Triton: a GEMM whose epilogue stores how far logits are below a maximum.

soft_targets/engine.py has the formulas. gemm_gluon.py has the same arithmetic as a pipeline, for
Hopper GPUs and class probabilities that a tensor map can read. softmax_triton.py computes the
gradient from the distances.

Functions with PTX = True use inline assembly, which Triton's interpreter does not support.

Shapes: C tokens of a chunk, D features, R features of a second, narrow term; B classes; T parts of
a row, which are the halves of the GEMM's tiles, with 4 numbers each: the largest z, and the sums of
exp(-d), y and y d; lower case = one tile, h a half of its classes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import TileColumns
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import transformed
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import (
    LOG2_E,
    describe,
    described,
    halves,
    multiprocessors,
    tile_at,
)

# A distance is stored as a 16-bit number of steps of 1 / STEPS. FURTHEST, the largest number,
# stands for infinity.
STEPS, FURTHEST = tl.constexpr(1024.0), tl.constexpr(65535)  # decision 0018
# 2^23. Adding it to a smaller float32 >= 0 rounds that to a whole number, which then is in the
# lowest bits of the sum.
WHOLE = tl.constexpr(8388608.0)
# The distance of classes that do not exist. Its exponential is 0, and so is its product with 0,
# unlike that of infinity.
NOTHING = tl.constexpr(200.0)


@triton.jit
def inside(columns, B, CUT: tl.constexpr):
    """Return the mask of columns that exist; it is constant without CUT, and then costs nothing."""
    return columns < B if CUT else columns == columns


@triton.jit
def load_soft(ptrs, stride, columns, mask):
    """Return the class probabilities of rows that begin at ptrs."""
    return tl.load(ptrs + columns.to(tl.int64) * stride, mask=mask, other=0.0)


@triton.jit
def smoothed(soft, class_weight_ptr, keep, floor, columns, mask, SMOOTHED: tl.constexpr):
    """Return the smoothed class probabilities, times the class weights."""
    soft = soft.to(tl.float32)
    if SMOOTHED:
        soft = tl.where(mask, soft * keep + floor, 0.0)
    if class_weight_ptr is not None:
        soft *= tl.load(class_weight_ptr + columns, mask=mask, other=0.0)
    return soft


@triton.jit
def _read(ptrs, z_ch, PTX: tl.constexpr):
    """Load elements at any addresses, in the layout of z_ch.

    z_ch is an argument only for its layout. Without it Triton would convert whole float32 tiles
    between layouts, which takes as much shared memory as a stage.
    """
    if PTX:
        bits_ch = tl.inline_asm_elementwise(
            "ld.global.b16 $0, [$1];", "=h,l,f", [ptrs.to(tl.int64), z_ch], tl.int16, is_pure=False, pack=1
        )
        return bits_ch.to(tl.bfloat16, bitcast=True)
    else:
        return tl.load(ptrs)


@triton.jit
def in_16_bits(distance_ch, PTX: tl.constexpr):
    """Return the distances as 16-bit numbers of steps; too large ones become FURTHEST.

    A saturating multiplication clamps them, because the GPU has twice as many lanes for it as for a
    minimum. A NaN becomes some number. This is harmless, because the sums of its row are NaN, and
    with them the whole row becomes NaN.
    """
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
def _store_partials(ptrs, max_c, sum_c, soft_mass_c, soft_nll_c, mask, PTX: tl.constexpr):
    """Store the four numbers of each row at once.

    Triton's own store goes through shared memory. Here the four lanes that hold the same row all
    write the same 16 bytes.
    """
    if PTX:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.global.v4.f32 [$1], {$2, $3, $4, $5};"
            " mov.u32 $0, 0; }",
            "=r,l,f,f,f,f,r", [ptrs.to(tl.int64), max_c, sum_c, soft_mass_c, soft_nll_c, mask.to(tl.int32)],
            tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        partials_c4 = tl.reshape(
            tl.join(tl.join(max_c, soft_mass_c), tl.join(sum_c, soft_nll_c)), (max_c.shape[0], 4)
        )
        tl.store(ptrs[:, None] + tl.arange(0, 4)[None, :], partials_c4, mask=mask[:, None])


@triton.jit
def distances_below(z_ch, bias_B_ptr, scale, columns, mask):
    """Return each row's largest logit in half a tile, and all logits' distances from it."""
    if bias_B_ptr is not None:
        z_ch += tl.load(bias_B_ptr + columns, mask=mask, other=0.0)
    z_ch, _ = transformed(z_ch, scale, 0.0, True)
    z_ch = tl.where(mask, z_ch, -float("inf"))
    max_c = tl.max(z_ch, 1)
    distance_ch = tl.where(max_c == -float("inf"), 0.0, max_c)[:, None] - z_ch
    return max_c, tl.where(mask, distance_ch, NOTHING)


@triton.jit
def store_sums(
    max_c, distance_ch, soft_ch, class_weight_B_ptr, partials_ptrs, rows, columns, mask, C, keep, floor,
    SMOOTHED: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Compute and store the four numbers of each row of half a tile."""
    soft_ch = smoothed(soft_ch, class_weight_B_ptr, keep, floor, columns, mask, SMOOTHED)
    soft_mass_c, soft_nll_c = tl.sum(soft_ch, 1), tl.sum(soft_ch * distance_ch, 1)
    sum_c = tl.sum(tl.exp2(distance_ch * -LOG2_E), 1)  # last, when the registers of y are free
    _store_partials(partials_ptrs, max_c, sum_c, soft_mass_c, soft_nll_c, rows < C, PTX)


@triton.jit
def _epilogue(
    z_ch, distance_CB, bias_B_ptr, scale, soft_CB_ptr, class_weight_B_ptr, partials_ptrs, rows,
    first_row, first,
    C, B, soft_row_stride, soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, STORE: tl.constexpr, CUT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Run the epilogue of half a tile: store the distances and the partial sums."""
    columns = (first + tl.arange(0, z_ch.shape[1]))[None, :]
    mask = inside(columns, B, CUT)
    # Beyond the last row or class, read the probabilities of the last one; they are not used.
    ptrs = soft_CB_ptr + (tl.minimum(rows, C - 1).to(tl.int64) * soft_row_stride)[:, None]
    there = tl.minimum(columns, B - 1) if CUT else columns
    soft_ch = tl.where(mask, _read(ptrs + there.to(tl.int64) * soft_stride, z_ch, PTX), 0.0)
    max_c, distance_ch = distances_below(z_ch, bias_B_ptr, scale, columns, mask)
    if STORE:
        if distance_CB.dtype == tl.int16:
            distance_CB.store([first_row, first], in_16_bits(distance_ch, PTX))
        else:
            distance_CB.store([first_row, first], distance_ch)
    store_sums(
        max_c, distance_ch, soft_ch, class_weight_B_ptr, partials_ptrs, rows, columns, mask, C, keep, floor,
        SMOOTHED, PTX,
    )  # fmt: skip


@remember_launches
@triton.jit
def _distances_kernel(
    x_CD, weight_BD, x_CR, weight_BR, distance_CB, bias_B_ptr, scale_ptr, soft_CB_ptr, class_weight_B_ptr,
    partials_CT4_ptr, C, B, D, T, soft_row_stride, soft_stride, keep, floor,
    SMOOTHED: tl.constexpr, STORE: tl.constexpr, PTX: tl.constexpr,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the partial results and the distances of each row and half tile.

    The partial results are float32: the largest z; the sum of exp(-d), where d = largest - z; the
    sums of y and of y d. With STORE the distances d are stored, too, in 16 bits if their memory has
    16-bit numbers, otherwise in float32.

    Grid: one program per multiprocessor, which takes tiles in turn.

    One loop goes over all steps of all tiles. Triton 3.6 could make it from two nested loops
    (flatten=True), but fails at an `if` that is more than a selection between numbers.
    """
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
            partials_ptrs = partials_CT4_ptr + 4 * (rows.to(tl.int64) * T + 2 * tile_b)
            halves_ch = halves(u_cb)  # before the branch, so that the kernel waits for the product once
            # Whole tiles have an epilogue of their own, because masks would cost a selection for
            # each element. Each branch stores its results itself. If they were merged after the
            # branch, Triton would give them the layout of y.
            if first + BLOCK_B > B:
                for half in tl.static_range(2):
                    _epilogue(
                        halves_ch[half], distance_CB, bias_B_ptr, scale, soft_CB_ptr, class_weight_B_ptr,
                        partials_ptrs + 4 * half, rows, first_row, first + half * (BLOCK_B // 2), C, B,
                        soft_row_stride, soft_stride, keep, floor, SMOOTHED, STORE, True, PTX,
                    )  # fmt: skip
            else:
                for half in tl.static_range(2):
                    _epilogue(
                        halves_ch[half], distance_CB, bias_B_ptr, scale, soft_CB_ptr, class_weight_B_ptr,
                        partials_ptrs + 4 * half, rows, first_row, first + half * (BLOCK_B // 2), C, B,
                        soft_row_stride, soft_stride, keep, floor, SMOOTHED, STORE, False, PTX,
                    )  # fmt: skip
            u_cb = tl.zeros((BLOCK_C, BLOCK_B), tl.float32)


def distances(terms: Sequence[tuple[Tensor, Tensor]], columns: TileColumns, out_CV: Tensor | None) -> Tensor:
    """Run the kernel on the operands of a chunk; `distances` in engine.py says what it returns."""
    (x_CD, weight_VD), *others = (described(term) for term in terms)
    x_CR, weight_VR = others[0] if others else (None, None)
    soft: Any = columns.soft_CB
    (C, D), V = terms[0][0].shape, terms[0][1].shape[0]
    T, programs = 2 * cdiv(V, tiles.BLOCK_B), multiprocessors(soft.device)
    partials_CT4 = torch.empty(C, T, 4, dtype=torch.float32, device=soft.device)
    out = None if out_CV is None else describe(place_of_distances(out_CV), tiles.BLOCK_C, tiles.BLOCK_B // 2)
    row_stride, stride = soft.stride()
    _distances_kernel[(programs,)](
        x_CD, weight_VD, x_CR, weight_VR, out, columns.transform.bias_V, columns.transform.scale, soft,
        columns.class_weight_B, partials_CT4, C, V, D, T, row_stride, stride, *columns.smoothing,
        SMOOTHED=columns.smoothing != (1, 0), STORE=out is not None, PTX=soft.is_cuda,
        PROGRAMS=programs, GROUP=tiles.GROUP,
        BLOCK_C=tiles.BLOCK_C, BLOCK_B=tiles.BLOCK_B, BLOCK_D=tiles.BLOCK_D,
        num_stages=tiles.STAGES, num_warps=tiles.WARPS,
    )  # fmt: skip
    return partials_CT4


def place_of_distances(grad_CV: Tensor) -> Tensor:
    """Return a gradient's memory for the distances, as 16-bit integers if it is half precision."""
    return grad_CV.view(torch.int16) if grad_CV.dtype.itemsize == 2 else grad_CV
