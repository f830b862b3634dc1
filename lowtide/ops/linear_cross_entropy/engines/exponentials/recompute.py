"""Reduce the partial sums of half tiles, and recompute the row tiles that are marked, in Triton.

exponentials/engine.py marks the row tiles whose reference was too low or not finite.

Shapes: C tokens of a chunk, T halves of tiles, B classes of a block, D features; lower case = one
tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe

BLOCK_D, BLOCK_B = 128, 64
STAGES, WARPS = 3, 8
# Rows and partial sums that a program reduces at a time.
REDUCED_ROWS, REDUCED_PARTS = 32, 128


@triton.jit
def _mark_kernel(rows_C_ptr, marks_ptr, C, BLOCK_C: tl.constexpr):
    """Mark the row tiles that have a marked row. Grid: one program per tile; marks start at 0."""
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    marked = tl.max(tl.load(rows_C_ptr + rows, mask=rows < C, other=0).to(tl.int32), 0)
    tl.store(marks_ptr + 1 + tl.program_id(0), marked)
    if marked != 0:
        tl.store(marks_ptr, 1)


@triton.jit
def _reduce_kernel(
    partials_TC_ptr, out_C_ptr, marks_ptr, T, C,
    LARGEST: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Reduce the partial results of half tiles to one per row. Grid: (C / BLOCK_C,).

    With marks, a program returns at once if its row tile is not marked, which is nearly always so.
    """
    first = tl.program_id(0) * BLOCK_C
    marked = 1
    if marks_ptr is not None:
        marked = tl.load(marks_ptr + 1 + first // HEIGHT)
    if marked != 0:
        rows = first + tl.arange(0, BLOCK_C)
        NEUTRAL: tl.constexpr = -float("inf") if LARGEST else 0.0
        result_tc = tl.full((BLOCK_T, BLOCK_C), NEUTRAL, tl.float32)
        for start in range(0, T, BLOCK_T):
            parts = start + tl.arange(0, BLOCK_T)
            mask_tc = (parts[:, None] < T) & (rows[None, :] < C)
            place_tc = parts[:, None].to(tl.int64) * C + rows[None, :]
            more_tc = tl.load(partials_TC_ptr + place_tc, mask=mask_tc, other=NEUTRAL)
            result_tc = tl.maximum(result_tc, more_tc) if LARGEST else result_tc + more_tc
        result_c = tl.max(result_tc, 0) if LARGEST else tl.sum(result_tc, 0)
        tl.store(out_C_ptr + rows, result_c, mask=rows < C)


@triton.jit
def _recomputed_product_kernel(
    exp_CB,
    weight_BD,
    marks_ptr,
    sum_CD_ptr,
    C,
    B,
    D,
    ADD: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Compute sum (+)= exp weight in marked row tiles. Grid: (C / BLOCK_C, D / BLOCK_D)."""
    tile_c, tile_d = tl.program_id(0), tl.program_id(1)
    if tl.load(marks_ptr + 1 + tile_c) != 0:
        sum_cd = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for start in range(0, B, BLOCK_B):
            exp_cb = exp_CB.load([tile_c * BLOCK_C, start])
            weight_bd = weight_BD.load([start, tile_d * BLOCK_D])
            sum_cd = tl.dot(exp_cb, weight_bd, sum_cd)
        rows = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        columns = tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
        place_cd = rows[:, None].to(tl.int64) * D + columns[None, :]
        mask_cd = (rows[:, None] < C) & (columns[None, :] < D)
        if ADD:
            sum_cd += tl.load(sum_CD_ptr + place_cd, mask=mask_cd, other=0.0)
        tl.store(sum_CD_ptr + place_cd, sum_cd, mask=mask_cd)


def mark_tiles(rows_C: Tensor) -> Tensor:
    """Return marks: whether any row tile has one of these rows, then the same for each tile."""
    height = tiles.BLOCK_C
    C, count = rows_C.shape[0], triton.cdiv(rows_C.shape[0], height)
    marks = torch.zeros(1 + count, dtype=torch.int32, device=rows_C.device)
    _mark_kernel[(count,)](rows_C, marks, C, BLOCK_C=height)
    return marks


def reduce_partials(
    partials_TC: Tensor, out_C: Tensor, *, largest: bool = False, marks: Tensor | None = None
) -> None:
    """Write the sum or maximum over half tiles to out; with `marks`, in marked row tiles only."""
    (T, C), height = partials_TC.shape, tiles.BLOCK_C
    rows = min(REDUCED_ROWS, height)
    _reduce_kernel[(triton.cdiv(C, rows),)](
        partials_TC, out_C, marks, T, C, LARGEST=largest, HEIGHT=height, BLOCK_C=rows, BLOCK_T=REDUCED_PARTS,
        num_warps=8,
    )  # fmt: skip


def recomputed_product(
    sum_CD: Tensor, exp_CB: Tensor, weight_BD: Tensor, marks: Tensor, *, add: bool
) -> None:
    """Compute the product again in row tiles that are marked; the tiles are gemm/triton.py's."""
    (C, B), D, height = exp_CB.shape, weight_BD.shape[1], tiles.BLOCK_C
    _recomputed_product_kernel[(triton.cdiv(C, height), triton.cdiv(D, BLOCK_D))](
        describe(exp_CB, height, BLOCK_B),
        describe(weight_BD, BLOCK_B, BLOCK_D),
        marks,
        sum_CD,
        C,
        B,
        D,
        ADD=add,
        BLOCK_C=height,
        BLOCK_B=BLOCK_B,
        BLOCK_D=BLOCK_D,
        num_stages=STAGES,
        num_warps=WARPS,
    )
