"""Compute distances on a Hopper GPU: the kernel of soft_targets/gemm_triton.py as a Gluon pipeline.

The arithmetic is that of the Triton kernel, by the same functions. engines/gemm/gluon.py has the
general part of the pipeline.

After the operands of a tile, its class probabilities take the next two stages of the ring, half the
classes each. They are loaded while the tile is still multiplied. The distances of half a tile are
stored while those of the next half are computed.

Shapes: see gemm_triton.py.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import TileColumns
from lowtide.ops.linear_cross_entropy.engines.gemm import gluon as pipeline
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.gluon import DEPTH, HALF, WIDTH, pack_args
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import halves, multiprocessors, tile_at
from lowtide.ops.linear_cross_entropy.engines.soft_targets.gemm_triton import (
    distances_below,
    in_16_bits,
    inside,
    place_of_distances,
    store_sums,
)

# Rows of a consumer warpgroup, and classes of half a tile.
ROWS, CLASSES = pipeline.BLOCK_A // 2, pipeline.BLOCK_B // 2
PART = tl.constexpr(CLASSES)


@gluon.jit
def _load(
    operands, soft_CB, a_s, b_s, full, empty, C, B, D,
    PROGRAMS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands and class probabilities of a program's tiles, as the producer warp."""
    x_CD, weight_BD, x_CR, weight_BR = operands
    tiles_c, tiles_b = gl.cdiv(C, 2 * HALF), gl.cdiv(B, WIDTH)
    step = 0
    for tile in range(gl.program_id(0), tiles_c * tiles_b, PROGRAMS):
        tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        row, first = tile_c * 2 * HALF, tile_b * WIDTH
        step = pipeline.load_product(
            x_CD, weight_BD, x_CR, weight_BR, row, first, D, a_s, b_s, full, empty, step, STAGES
        )  # fmt: skip
        for half in gl.static_range(2):
            stage = pipeline.acquire_empty(empty, step, STAGES)
            mbarrier.expect(full.index(stage), HALF * WIDTH * 2)
            soft_s = pipeline.view(b_s.index(stage), gl.bfloat16, [2, HALF, PART], soft_CB.layout)
            for group in gl.static_range(2):
                place = [row + group * HALF, first + half * PART]
                pipeline.load(soft_CB, place, full.index(stage), soft_s.index(group))
            step += 1


@gluon.jit
def _distances_of_half(
    z_ch, bias_B_ptr, scale, soft_ch, class_weight_B_ptr, partials_ptrs, rows, columns, C, B, keep, floor,
    SMOOTHED: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """Store the partial sums of half a tile, and return its distances in 16 bits."""
    mask = inside(columns, B, CUT)
    max_c, distance_ch = distances_below(z_ch, bias_B_ptr, scale, columns, mask)
    store_sums(
        max_c, distance_ch, soft_ch, class_weight_B_ptr, partials_ptrs, rows, columns, mask, C, keep, floor,
        SMOOTHED, True,
    )  # fmt: skip
    return in_16_bits(distance_ch, True)


@gluon.jit
def _multiply(
    out, of_classes, soft_CB, partials_CT4_ptr, a_s, b_s, full, empty, C, B, T, steps, keep, floor,
    WHICH: gl.constexpr, SMOOTHED: gl.constexpr, PROGRAMS: gl.constexpr,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply a program's tiles and run their epilogues, as consumer warpgroup WHICH of two."""
    distance_CB, distance_s = out
    bias_B_ptr, scale_ptr, class_weight_B_ptr = of_classes
    tiles_c, tiles_b = gl.cdiv(C, 2 * HALF), gl.cdiv(B, WIDTH)
    scale = None
    if scale_ptr is not None:
        scale = gl.load(scale_ptr)
    step = 0
    for tile in range(gl.program_id(0), tiles_c * tiles_b, PROGRAMS):
        tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        u_cb, step = pipeline.multiply(a_s, b_s, full, empty, step, steps, WHICH, STAGES, False)
        halves_ch = halves(u_cb)
        LAYOUT: gl.constexpr = halves_ch[0].type.layout
        first_row = tile_c * 2 * HALF + WHICH * HALF
        rows = first_row + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
        for half in gl.static_range(2):
            first = tile_b * WIDTH + half * PART
            columns = (first + gl.arange(0, PART, gl.SliceLayout(0, LAYOUT)))[None, :]
            partials_ptrs = partials_CT4_ptr + 4 * (rows.to(gl.int64) * T + 2 * tile_b + half)
            stage = pipeline.await_stage(full, step, STAGES)
            soft_s = pipeline.view(b_s.index(stage), gl.bfloat16, [2, HALF, PART], soft_CB.layout)
            soft_ch = soft_s.index(WHICH).load(LAYOUT)
            step += 1
            pipeline.release(empty, step, True, STAGES)
            # Branch here, because masks would cost a selection for each element.
            if first + PART > B:
                bits_ch = _distances_of_half(
                    halves_ch[half], bias_B_ptr, scale, soft_ch, class_weight_B_ptr, partials_ptrs, rows,
                    columns, C, B, keep, floor, SMOOTHED, True,
                )  # fmt: skip
            else:
                bits_ch = _distances_of_half(
                    halves_ch[half], bias_B_ptr, scale, soft_ch, class_weight_B_ptr, partials_ptrs, rows,
                    columns, C, B, keep, floor, SMOOTHED, False,
                )  # fmt: skip
            if distance_CB is not None:
                # `store_tile` waits for the store before, which reads the same shared memory. By
                # now that store has probably ended.
                pipeline.store_tile(
                    bits_ch, distance_s.index(WHICH), distance_CB, [first_row, first]
                )  # fmt: skip
    if distance_CB is not None:
        tma.store_wait(0)


@remember_launches
@gluon.jit
def _distance_pipeline_kernel(
    x_CD, weight_BD, x_CR, weight_BR, distance_CB, bias_B_ptr, scale_ptr, soft_CB, class_weight_B_ptr,
    partials_CT4_ptr, C, B, D, T, keep, floor,
    SMOOTHED: gl.constexpr, PROGRAMS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute what `_distances_kernel` of soft_targets/gemm_triton.py does.

    Grid: one program per multiprocessor, which takes tiles in turn.
    """
    a_s, b_s, full, empty = pipeline.ring(x_CD, weight_BD, STAGES, False)
    steps = gl.cdiv(D, DEPTH)
    if x_CR is not None:
        steps += 1
    distance_s = None
    if distance_CB is not None:
        distance_s = gl.allocate_shared_memory(gl.int16, [2, HALF, PART], distance_CB.layout)
    operands, out = pack_args(x_CD, weight_BD, x_CR, weight_BR), pack_args(distance_CB, distance_s)
    of_classes = pack_args(bias_B_ptr, scale_ptr, class_weight_B_ptr)
    gl.warp_specialize(
        [
            (_multiply, (
                out, of_classes, soft_CB, partials_CT4_ptr, a_s, b_s, full, empty, C, B, T, steps,
                keep, floor,
                0, SMOOTHED, PROGRAMS, GROUP, STAGES,
            )),
            (_multiply, (
                out, of_classes, soft_CB, partials_CT4_ptr, a_s, b_s, full, empty, C, B, T, steps,
                keep, floor,
                1, SMOOTHED, PROGRAMS, GROUP, STAGES,
            )),
            (_load, (operands, soft_CB, a_s, b_s, full, empty, C, B, D, PROGRAMS, GROUP, STAGES)),
        ],
        [4, 1], REGISTERS,
    )  # fmt: skip


def distances(terms: Sequence[tuple[Tensor, Tensor]], columns: TileColumns, out_CV: Tensor | None) -> Tensor:
    """Run the kernel on the operands of a chunk; `distances` in engine.py says what it returns."""
    (x_CD, weight_VD), (x_CR, weight_VR) = (pipeline.described(term) for term in (*terms, None)[:2])
    soft: Any = columns.soft_CB
    out = None if out_CV is None else pipeline.describe(place_of_distances(out_CV), ROWS, CLASSES)
    (C, D), V = terms[0][0].shape, terms[0][1].shape[0]
    T, programs = 2 * cdiv(V, pipeline.BLOCK_B), multiprocessors(soft.device)
    partials_CT4 = torch.empty(C, T, 4, dtype=torch.float32, device=soft.device)
    _distance_pipeline_kernel[(programs,)](
        x_CD, weight_VD, x_CR, weight_VR, out, columns.transform.bias_V, columns.transform.scale,
        pipeline.describe(soft, ROWS, CLASSES), columns.class_weight_B, partials_CT4, C, V, D, T,
        *columns.smoothing, SMOOTHED=columns.smoothing != (1, 0), PROGRAMS=programs, GROUP=tiles.GROUP,
        STAGES=pipeline.STAGES, REGISTERS=pipeline.REGISTERS, num_warps=pipeline.WARPS,
        # With fused multiply-adds, the rounding of scaled logits in `transformed` spills registers.
        enable_fp_fusion=columns.transform.scale is None,
    )  # fmt: skip
    return partials_CT4
