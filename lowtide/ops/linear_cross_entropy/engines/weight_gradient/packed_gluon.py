"""Add the product exp^T x to a packed weight-gradient sum, by a GEMM pipelined in Gluon on Hopper.

engines/gemm/gluon.py has the pipeline, packed_triton.py the formats of 24 and 20 bits.

With few rows per chunk, reading and writing the sum of a tile takes as long as computing the tile's
product. Therefore the sum passes through the ring like the operands. After the last operands of a
tile, each of the next two stages brings half of the tile's sum. The consumers add the product to
that half, write the result back to the stage, and store it from there (decision 0040).

Shapes: C tokens of a chunk, D features, P pairs of features, V classes; lower case = one
warpgroup's rows of a tile, h the pairs of half the tile's features.
"""

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm import gluon as pipeline
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows
from lowtide.ops.linear_cross_entropy.engines.gemm.gluon import (
    DEPTH,
    HALF,
    WIDTH,
    acquire_empty,
    await_stage,
    describe,
    load,
    load_tiles,
    multiply,
    pack_args,
    release,
    ring,
    store,
    view,
)
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import halves, multiprocessors, tile_at
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.packed_triton import (
    GROUP,
    added_tiles,
    from_pairs,
    left_to_targets,
    less_smoothing,
    rounded_pairs,
    to_pairs,
)

# Pairs of features in half a tile. For both warpgroups' rows they fill a stage's memory for x.
COLUMNS = tl.constexpr(64)


@gluon.jit
def _pairs_of(b_s, stage, WHICH: gl.constexpr, pair_VP):
    """Return a stage's memory for the pairs of a warpgroup, in the place of x."""
    return view(b_s.index(stage), pair_VP.dtype, [2, HALF, COLUMNS], pair_VP.layout).index(WHICH)


@gluon.jit
def _low_of(a_s, stage, WHICH: gl.constexpr, low_VP):
    """Return a stage's memory for the lower bits of a warpgroup, in the place of its rows of exp.

    With 16 bits per pair they take all of that memory, with 8 bits half.
    """
    NUMBERS: gl.constexpr = 16 // low_VP.dtype.primitive_bitwidth
    return view(a_s.index(2 * stage + WHICH), low_VP.dtype, [NUMBERS, HALF, COLUMNS], low_VP.layout).index(0)


@gluon.jit
def _load_all(
    exp_CV, x_CD, pair_VP, low_VP, a_s, b_s, full, empty, counted, C, D, V,
    ADD: gl.constexpr, ALWAYS: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the operands and the previous sums of all tiles, as the producer warp."""
    tiles_v, tiles_d = gl.cdiv(V, 2 * HALF), gl.cdiv(D, WIDTH)
    count_ptr, first_place = counted
    tiles = added_tiles(count_ptr, first_place, C, tiles_v * tiles_d, ALWAYS)
    rows = counted_rows(count_ptr, first_place, C)
    BYTES: gl.constexpr = 4 + low_VP.dtype.primitive_bitwidth // 8
    step = 0
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        tile_v, tile_d = tile_at(tile, tiles_v, tiles_d, GROUP)
        for start in range(0, rows, DEPTH):
            step = load_tiles(
                exp_CV, x_CD, tile_v * 2 * HALF, tile_d * WIDTH, start, a_s, b_s, full, empty, step,
                STAGES, True,
            )  # fmt: skip
        for half in gl.static_range(2):
            stage = acquire_empty(empty, step, STAGES)
            if ADD:
                mbarrier.expect(full.index(stage), 2 * HALF * COLUMNS * BYTES)
                for which in gl.static_range(2):
                    first_class = tile_v * 2 * HALF + which * HALF
                    place = [first_class, (tile_d * 2 + half) * COLUMNS]
                    load(pair_VP, place, full.index(stage), _pairs_of(b_s, stage, which, pair_VP))
                    load(low_VP, place, full.index(stage), _low_of(a_s, stage, which, low_VP))
            else:
                # Nothing is loaded, but the consumers may now write results to the stage.
                mbarrier.arrive(full.index(stage), count=1)
            step += 1


@gluon.jit
def _add_halves(
    sum_vd, first_class, tile_d, pair_VP, low_VP, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr,
    targets, a_s, b_s, full, empty, step, C, D, V, WHICH: gl.constexpr,
    ADD: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add the product of a tile to the previous sum, in one half of the tile after the other.

    With a factor, round the result to the gradient. With `targets`, round only classes that are no
    targets. Return the next step.
    """
    first_V_ptr, low_CP_ptr = targets
    halves_vh = halves(sum_vd)
    for half in gl.static_range(2):
        column = (tile_d * 2 + half) * COLUMNS
        stage = await_stage(full, step, STAGES)
        pair_s = _pairs_of(b_s, stage, WHICH, pair_VP)
        low_s = _low_of(a_s, stage, WHICH, low_VP)
        even_vh, odd_vh = tl.split(tl.reshape(halves_vh[half], (HALF, COLUMNS, 2)))
        if ADD:
            even_before_vh, odd_before_vh = from_pairs(
                pair_s.load(even_vh.type.layout), low_s.load(even_vh.type.layout)
            )
            even_vh, odd_vh = even_vh + even_before_vh, odd_vh + odd_before_vh
        classes = first_class + gl.arange(0, HALF, gl.SliceLayout(1, even_vh.type.layout))
        pairs = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, even_vh.type.layout))
        if first_V_ptr is not None:
            pair_vh = left_to_targets(even_vh, odd_vh, first_V_ptr, low_CP_ptr, classes, pairs, C, D, V)
        elif factor_ptr is None:
            pair_vh, low_vh = to_pairs(even_vh, odd_vh, low_VP.dtype)
            low_s.store(low_vh)
        else:
            if smoothing_row_D_ptr is not None:
                even_vh, odd_vh = less_smoothing(
                    even_vh, odd_vh, class_weight_V_ptr, smoothing_row_D_ptr, classes, pairs, D, V
                )
            pair_vh = rounded_pairs(even_vh, odd_vh, gl.load(factor_ptr))
        pair_s.store(pair_vh)
        fence_async_shared()
        tma.store_wait(0)  # for the stores of the previous half, whose stage is released next
        release(empty, step, half > 0, STAGES)  # waits for all warps, so this half is written too
        store(pair_VP, [first_class, column], pair_s)
        if factor_ptr is None and first_V_ptr is None:
            store(low_VP, [first_class, column], low_s)
        step += 1
    tma.store_wait(0)
    release(empty, step, True, STAGES)
    return step


@gluon.jit
def _add_all(
    WHICH: gl.constexpr, pair_VP, low_VP, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr,
    targets, a_s, b_s, full, empty, counted, C, D, V,
    ADD: gl.constexpr, ALWAYS: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Multiply and add all tiles, as consumer warpgroup WHICH of two."""
    tiles_v, tiles_d = gl.cdiv(V, 2 * HALF), gl.cdiv(D, WIDTH)
    count_ptr, first_place = counted
    tiles = added_tiles(count_ptr, first_place, C, tiles_v * tiles_d, ALWAYS)
    rows = counted_rows(count_ptr, first_place, C)
    step = 0
    for tile in range(gl.program_id(0), tiles, PROGRAMS):
        tile_v, tile_d = tile_at(tile, tiles_v, tiles_d, GROUP)
        sum_vd, step = multiply(a_s, b_s, full, empty, step, gl.cdiv(rows, DEPTH), WHICH, STAGES, True)
        first_class = tile_v * 2 * HALF + WHICH * HALF
        step = _add_halves(
            sum_vd, first_class, tile_d, pair_VP, low_VP, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr,
            targets, a_s, b_s, full, empty, step, C, D, V, WHICH, ADD, STAGES,
        )  # fmt: skip


@remember_launches
@gluon.jit
def _add_product_pipelined_kernel(
    exp_CV, x_CD, pair_VP, low_VP, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr,
    first_V_ptr, low_CP_ptr, count_ptr, first_place, C, D, V,
    ADD: gl.constexpr, GROUP: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Write exp^T x to the sum or, with ADD, add it.

    If a factor is given, for the last chunk, round the result to the gradient. If first_V_ptr is
    given, for the only chunk, round the classes that are no targets, as `left_to_targets` says.
    Grid: one program for each multiprocessor that is not spared, which takes tiles in turn.
    """
    a_s, b_s, full, empty = ring(exp_CV, x_CD, STAGES, True)
    counted, targets = pack_args(count_ptr, first_place), pack_args(first_V_ptr, low_CP_ptr)
    ALWAYS: gl.constexpr = not ADD or factor_ptr is not None
    gl.warp_specialize(
        [
            (_add_all, (
                0, pair_VP, low_VP, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr,
                targets, a_s, b_s, full, empty, counted, C, D, V, ADD, ALWAYS, GROUP, PROGRAMS, STAGES,
            )),
            (_add_all, (
                1, pair_VP, low_VP, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr,
                targets, a_s, b_s, full, empty, counted, C, D, V, ADD, ALWAYS, GROUP, PROGRAMS, STAGES,
            )),
            (_load_all, (
                exp_CV, x_CD, pair_VP, low_VP, a_s, b_s, full, empty,
                counted, C, D, V, ADD, ALWAYS, GROUP, PROGRAMS, STAGES,
            )),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


def add_product(
    pair_VP: Tensor,
    low_VP: Tensor,
    exp_CV: Tensor,
    x_CD: Tensor,
    *,
    add: bool,
    counted: CountedChunk = ALL,
    rounding: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    targets: tuple[Tensor | None, Tensor | None] = (None, None),
    spared: int = 0,
) -> None:
    """Write exp_CV^T x_CD to the sum or, with `add`, add it; leave `spared` multiprocessors free.

    `add_product` in packed_triton.py explains `rounding` and `targets`.
    """
    (C, D), V = x_CD.shape, pair_VP.shape[0]
    programs, part = multiprocessors(x_CD.device) - spared, (pipeline.BLOCK_A // 2, COLUMNS.value)
    _add_product_pipelined_kernel[(programs,)](
        describe(exp_CV, pipeline.BLOCK_K, pipeline.BLOCK_A // 2),
        describe(x_CD, pipeline.BLOCK_K, pipeline.BLOCK_B),
        describe(pair_VP, *part),
        describe(low_VP, *part),
        *rounding,
        *targets,
        *counted[1:],
        C,
        D,
        V,
        ADD=add,
        GROUP=GROUP,
        PROGRAMS=programs,
        STAGES=pipeline.STAGES,
        REGISTERS=pipeline.REGISTERS,
        num_warps=pipeline.WARPS,
    )
