"""Reduce the partial results of half tiles, mark row tiles, and recompute marked ones, in Triton.

A row tile is marked if the sum of one of its rows is too large or NaN: then the row's reference was
too low or not finite. For log-probabilities, a row tile is marked if the largest logit of a row is
not finite. gemm/gemm_triton.py computes the exponentials of marked row tiles again, and
`recomputed_product` their product for dX.

Marks are a vector of int32 numbers. The first is 1 if any row tile is marked; each of the others is
1 if its own row tile is marked. `target_logits` in row_kernels.py sets all to 0.

Shapes: C tokens of a chunk, T half tiles of a row, B classes of a block, D features; lower case =
one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas import row_math
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe

LARGEST_SUM = tl.constexpr(row_math.LARGEST_SUM)
BLOCK_D, BLOCK_B = 128, 64
STAGES, WARPS = 3, 8
# Rows that a program reduces, and partial results of a row that it reads at a time.
REDUCED_ROWS, REDUCED_PARTS = 32, 128


@triton.jit
def reduced(partials_TC_ptr, rows, T, C, LARGEST: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the sum (the maximum, if LARGEST) of each row's partial results."""
    NEUTRAL: tl.constexpr = -float("inf") if LARGEST else 0.0
    result_tc = tl.full((BLOCK_T, BLOCK_C), NEUTRAL, tl.float32)
    for start in range(0, T, BLOCK_T):
        parts = start + tl.arange(0, BLOCK_T)
        mask_tc = (parts[:, None] < T) & (rows[None, :] < C)
        place_tc = parts[:, None].to(tl.int64) * C + rows[None, :]
        more_tc = tl.load(partials_TC_ptr + place_tc, mask=mask_tc, other=NEUTRAL)
        result_tc = tl.maximum(result_tc, more_tc) if LARGEST else result_tc + more_tc
    return tl.max(result_tc, 0) if LARGEST else tl.sum(result_tc, 0)


@remember_launches
@triton.jit
def _sum_kernel(
    partials_TC_ptr, out_C_ptr, marks_ptr, count_ptr, first_place, T, C,
    MARK: tl.constexpr, HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Add up the partial sums of each row. Grid: (C / BLOCK_C,).

    MARK: mark the row tile if a sum is too large or NaN. If marks are given without MARK, add up
    only in marked row tiles, of which there are nearly always none. Rows that do not count get 0.
    """
    first = tl.program_id(0) * BLOCK_C
    T = tl.where(first < counted_rows(count_ptr, first_place, C), T, 0)
    mark_ptr = marks_ptr
    wanted = 1
    if marks_ptr is not None:
        mark_ptr = marks_ptr + 1 + first // HEIGHT
        if not MARK:
            wanted = tl.load(mark_ptr)
    if wanted != 0:
        rows = first + tl.arange(0, BLOCK_C)
        sum_c = reduced(partials_TC_ptr, rows, T, C, False, BLOCK_C, BLOCK_T)
        tl.store(out_C_ptr + rows, sum_c, mask=rows < C)
        if MARK:
            far = tl.max(tl.where(sum_c <= LARGEST_SUM, 0, 1), 0)  # 1 for NaN too
            if far != 0:  # the programs of a row tile may all store, since they store the same
                tl.store(marks_ptr, 1)
                tl.store(mark_ptr, 1)


@remember_launches
@triton.jit
def _references_kernel(
    maxima_TC_ptr, sum_C_ptr, ignored_C_ptr, reference_C_ptr, marks_ptr, T, C,
    HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Replace the reference of a row whose sum is too large or NaN. Grid: (C / BLOCK_C,).

    The new reference is the row's largest logit, or 0 if all logits are -inf, as on a rank whose
    classes are all excluded; the row's sum is then 0. Ignored rows and rows of unmarked row tiles
    keep their references.
    """
    first = tl.program_id(0) * BLOCK_C
    if tl.load(marks_ptr + 1 + first // HEIGHT) != 0:
        rows = first + tl.arange(0, BLOCK_C)
        max_c = reduced(maxima_TC_ptr, rows, T, C, True, BLOCK_C, BLOCK_T)
        max_c = tl.where(max_c == -float("inf"), 0.0, max_c)
        near_c = tl.load(sum_C_ptr + rows, mask=rows < C, other=0.0) <= LARGEST_SUM
        ignored_c = tl.load(ignored_C_ptr + rows, mask=rows < C, other=1) != 0
        old_c = tl.load(reference_C_ptr + rows, mask=rows < C, other=0.0)
        tl.store(reference_C_ptr + rows, tl.where(near_c | ignored_c, old_c, max_c), mask=rows < C)


@remember_launches
@triton.jit
def _mark_infinite_kernel(
    maxima_TC_ptr, ignored_C_ptr, marks_ptr, T, C,
    HEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Mark the row tile if the largest logit of a row is not finite. Grid: (C / BLOCK_C,).

    Ignored rows mark nothing.
    """
    first = tl.program_id(0) * BLOCK_C
    rows = first + tl.arange(0, BLOCK_C)
    max_c = reduced(maxima_TC_ptr, rows, T, C, True, BLOCK_C, BLOCK_T)
    ignored_c = tl.load(ignored_C_ptr + rows, mask=rows < C, other=1) != 0
    infinite = tl.max(tl.where(ignored_c | (tl.abs(max_c) < float("inf")), 0, 1), 0)
    if infinite != 0:
        tl.store(marks_ptr, 1)
        tl.store(marks_ptr + 1 + first // HEIGHT, 1)


@remember_launches
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
    """Write the product exp weight in marked row tiles. Grid: (C / BLOCK_C, D / BLOCK_D).

    ADD: add the product to the sum that is there.
    """
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


def marks_memory(rows_C: Tensor) -> Tensor:
    """Return uninitialised memory for the marks of a chunk's row tiles."""
    return rows_C.new_empty(1 + cdiv(rows_C.shape[0], tiles.BLOCK_C), dtype=torch.int32)


def mark_infinite(maxima_TC: Tensor, ignored_C: Tensor, marks: Tensor) -> None:
    """Mark row tiles with a row that is not ignored and whose largest logit is not finite."""
    T, C = maxima_TC.shape
    grid, options = reducing(C)
    _mark_infinite_kernel[grid](maxima_TC, ignored_C, marks, T, C, **options)


def add_partials(
    partials_TC: Tensor,
    out_C: Tensor,
    *,
    marks: Tensor | None = None,
    mark: bool = False,
    counted: CountedChunk = ALL,
) -> None:
    """Write the sum of each row's partial sums to out_C; with `marks`, in marked row tiles only.

    With `mark`, write it in all row tiles, and mark those in which a sum is too large or NaN.
    """
    T, C = partials_TC.shape
    grid, options = reducing(C)
    _sum_kernel[grid](
        partials_TC, out_C, marks, counted.number, counted.first_place, T, C, MARK=mark, **options
    )


def replace_references(
    maxima_TC: Tensor, sum_C: Tensor, ignored_C: Tensor, reference_C: Tensor, marks: Tensor
) -> None:
    """Replace references by the largest logit in rows whose sum is too large or NaN.

    `_references_kernel` has the exceptions.
    """
    T, C = maxima_TC.shape
    grid, options = reducing(C)
    _references_kernel[grid](maxima_TC, sum_C, ignored_C, reference_C, marks, T, C, **options)


def reducing(C: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the grid and the options of a kernel that reduces partial results.

    All such kernels add in the same order, so that sums of the same numbers have the same bits.
    """
    rows = min(REDUCED_ROWS, tiles.BLOCK_C)
    options = {"HEIGHT": tiles.BLOCK_C, "BLOCK_C": rows, "BLOCK_T": REDUCED_PARTS, "num_warps": 8}
    return (cdiv(C, rows),), options


def recomputed_product(
    sum_CD: Tensor, exp_CB: Tensor, weight_BD: Tensor, marks: Tensor, *, add: bool
) -> None:
    """Write exp_CB weight_BD to sum_CD in marked row tiles; with `add`, add it."""
    (C, B), D, height = exp_CB.shape, weight_BD.shape[1], tiles.BLOCK_C
    _recomputed_product_kernel[(cdiv(C, height), cdiv(D, BLOCK_D))](
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
