"""Compute exponentials on a Hopper GPU, like gemm_triton.py, but with a GEMM pipelined in Gluon.

engines/gemm/gluon.py has the pipeline. The epilogue is gemm_triton.py's function. gemm.py chooses
between the two kernels.

Shapes: C tokens of a chunk, D features, R features of a second, narrow term; B classes of a block,
or all; lower case = one warpgroup's rows of a tile, h half of a tile's classes.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm.gemm_triton import epilogue
from lowtide.ops.linear_cross_entropy.engines.gemm import gluon as pipeline
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows
from lowtide.ops.linear_cross_entropy.engines.gemm.gluon import (
    DEPTH,
    HALF,
    WIDTH,
    load_product,
    multiply,
    pack_args,
    ring,
    store_tile,
)
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import halves, tile_at


@gluon.jit
def _load(
    operands, a_s, b_s, full, empty, counted, C, B, D,
    PROGRAMS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands of all tiles, as the producer warp."""
    x_CD, weight_BD, x_CR, weight_BR = operands
    count_ptr, first_place = counted
    tiles_c, tiles_b = gl.cdiv(counted_rows(count_ptr, first_place, C), 2 * HALF), gl.cdiv(B, WIDTH)
    step = 0
    for tile in range(gl.program_id(0), tiles_c * tiles_b, PROGRAMS):
        tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        row, first = tile_c * 2 * HALF, tile_b * WIDTH
        step = load_product(
            x_CD, weight_BD, x_CR, weight_BR, row, first, D, a_s, b_s, full, empty, step, STAGES
        )  # fmt: skip


@gluon.jit
def _multiply_and_store(
    a_s, b_s, full, empty, out, of_rows, of_classes, found, counted, C, B, steps, first_class,
    WHICH: gl.constexpr, STORE: gl.constexpr, GUARDED: gl.constexpr, ADD: gl.constexpr,
    PROGRAMS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply all tiles and run their epilogues, as consumer warpgroup WHICH of two."""
    exp_CB, exp_s = out
    reference_C_ptr, target_C_ptr, softmax_coef_C_ptr, entropy_coef_C_ptr, factor_C_ptr = of_rows
    bias_B_ptr, scale_ptr = of_classes
    sum_ptr, mean_ptr, grad_dot_logit_ptr, max_ptr, argmax_ptr = found
    count_ptr, first_place = counted
    tiles_c, tiles_b = gl.cdiv(counted_rows(count_ptr, first_place, C), 2 * HALF), gl.cdiv(B, WIDTH)
    scale = None
    if scale_ptr is not None:
        scale = gl.load(scale_ptr)
    step = 0
    for tile in range(gl.program_id(0), tiles_c * tiles_b, PROGRAMS):
        tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        u_cb, step = multiply(a_s, b_s, full, empty, step, steps, WHICH, STAGES, False)
        halves_ch = halves(u_cb)
        LAYOUT: gl.constexpr = halves_ch[0].type.layout
        first_row = tile_c * 2 * HALF + WHICH * HALF
        rows = first_row + gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
        target_c = (gl.load(target_C_ptr + rows, mask=rows < C, other=0) - first_class).to(gl.int32)
        reference_c = gl.load(reference_C_ptr + rows, mask=rows < C, other=float("inf"))
        for half in gl.static_range(2):
            first = tile_b * WIDTH + half * (WIDTH // 2)
            columns = first + gl.arange(0, WIDTH // 2, gl.SliceLayout(0, LAYOUT))
            exp_ch = epilogue(
                halves_ch[half], rows, columns, first, 2 * tile_b + half, reference_c, target_c, scale, C, B,
                bias_B_ptr, softmax_coef_C_ptr, entropy_coef_C_ptr, factor_C_ptr,
                sum_ptr, mean_ptr, grad_dot_logit_ptr, max_ptr, argmax_ptr,
                STORE, GUARDED, ADD, False, False, 0.0,
            )  # fmt: skip
            if STORE:
                place = [first_row, first]
                store_tile(exp_ch.to(exp_CB.dtype), exp_s.index(WHICH), exp_CB, place)
    if STORE:
        tma.store_wait(0)


@remember_launches
@gluon.jit
def exponentials_kernel(
    x_CD, weight_BD, x_CR, weight_BR, exp_CB, reference_C_ptr, target_C_ptr, bias_B_ptr, scale_ptr,
    softmax_coef_C_ptr, entropy_coef_C_ptr, factor_C_ptr, sum_ptr, mean_ptr, grad_dot_logit_ptr,
    max_ptr, argmax_ptr, count_ptr, first_place,
    C, B, D, first_class,
    STORE: gl.constexpr, GUARDED: gl.constexpr, ADD: gl.constexpr,
    PROGRAMS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute what the kernel of this name in gemm_triton.py does, without soft cap and marks.

    Grid: one program per multiprocessor, which takes tiles in turn.
    """
    a_s, b_s, full, empty = ring(x_CD, weight_BD, STAGES, False)
    exp_s = None
    if STORE:
        exp_s = gl.allocate_shared_memory(exp_CB.dtype, [2, HALF, WIDTH // 2], exp_CB.layout)
    steps = gl.cdiv(D, DEPTH)
    if x_CR is not None:
        steps += 1
    operands, out = pack_args(x_CD, weight_BD, x_CR, weight_BR), pack_args(exp_CB, exp_s)
    of_rows = pack_args(reference_C_ptr, target_C_ptr, softmax_coef_C_ptr, entropy_coef_C_ptr, factor_C_ptr)
    of_classes = pack_args(bias_B_ptr, scale_ptr)
    found = pack_args(sum_ptr, mean_ptr, grad_dot_logit_ptr, max_ptr, argmax_ptr)
    counted = pack_args(count_ptr, first_place)
    gl.warp_specialize([
        (_multiply_and_store, (
            a_s, b_s, full, empty, out, of_rows, of_classes, found, counted, C, B, steps, first_class,
            0, STORE, GUARDED, ADD, PROGRAMS, GROUP, STAGES,
        )),
        (_multiply_and_store, (
            a_s, b_s, full, empty, out, of_rows, of_classes, found, counted, C, B, steps, first_class,
            1, STORE, GUARDED, ADD, PROGRAMS, GROUP, STAGES,
        )),
        (_load, (operands, a_s, b_s, full, empty, counted, C, B, D, PROGRAMS, GROUP, STAGES)),
    ], [4, 1], REGISTERS)  # fmt: skip


def run(
    terms: Sequence[tuple[Tensor, Tensor] | None],
    exp_CB: Tensor | None,
    arguments: Sequence[Any],
    constants: dict[str, Any],
) -> None:
    """Launch the kernel on the first term and, unless it is None, the second.

    `arguments` are those of the Triton kernel from reference_C on, without marks.
    """
    exponentials_kernel[(constants["PROGRAMS"],)](
        *(operand for term in terms for operand in pipeline.described(term)),
        None if exp_CB is None else pipeline.describe(exp_CB, pipeline.BLOCK_A // 2, pipeline.BLOCK_B // 2),
        *arguments,
        **constants,
        STAGES=pipeline.STAGES,
        REGISTERS=pipeline.REGISTERS,
        num_warps=pipeline.WARPS,
    )
