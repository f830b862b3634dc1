"""Form the rows of dX that count (counted_rows.py) in Triton kernels, and skip ignored rows.

exponentials/engine.py has the formula. cuBLAS cannot read the number of rows that count, which only
the device knows. If no row is ignored, cuBLAS may take less time (decision 0078).

A wave is as many tiles as there are multiprocessors. The tiles that do not fill a wave are divided:
several programs each multiply a part of the classes of one tile, and another kernel sums these
parts in order (decisions 0079 and 0087). Of r such tiles and P programs, P // r programs for each
tile take its first classes. Each program that is left takes the last classes, the tail, of the same
number of tiles, one after another. So all programs take about the same time. Those that run side by
side read the same classes at the same time, which is when the L2 cache has them. Where tails save
nothing, or a program would have few classes, the parts of a tile are equal; where parts save too
little, tiles stay whole. The division follows from the number of rows that count. So a row of dX
may have other bits where another number of rows is ignored.

Shapes: N tokens, D features, V classes; C tokens of a chunk; lower case = one tile, q a quarter of
its features, r some of its rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows, row_at
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe, halves, multiprocessors, tile_at
from lowtide.ops.linear_cross_entropy.planning.division import cost_model

BLOCK_V = 64
STAGES, WARPS = 4, 8
GROUP = 8  # row tiles that read a block of the weight's features while it is in the L2 cache
SUMMED_ROWS = 32  # rows of a tile whose parts a program sums


@triton.jit
def _division(
    tiles, V, PROGRAMS: tl.constexpr, FEWEST: tl.constexpr, BLOCK_V: tl.constexpr
):  # fmt: skip
    """Return how many tiles are whole, and how the others are divided.

    That is: the programs of each of these tiles, the steps of such a program, the steps of the
    tail, and how many tails each program that is left takes. Steps are those of the inner
    dimension. A program of a tile has at least FEWEST classes. Tiles are divided if that saves more
    than twice the steps of FEWEST classes. The beginning of a part is taken to cost half of these
    steps.
    """
    steps, rest, fewest = tl.cdiv(V, BLOCK_V), tiles % PROGRAMS, FEWEST // BLOCK_V
    some = tl.maximum(rest, 1)
    own = tl.minimum(PROGRAMS // some, V // FEWEST)
    left = PROGRAMS - own * rest
    tails = tl.cdiv(rest, tl.maximum(left, 1))
    tail = steps // (own * tails + 1)
    even, shared = tl.cdiv(steps, tl.maximum(own, 1)), tl.cdiv(steps - tail, tl.maximum(own, 1))
    with_tails = shared + (tails + 1) * (fewest // 2)
    leaves = (own == PROGRAMS // some) & (left > 0) & (with_tails < even)
    divides = (rest > 0) & (own > 0) & (tl.where(leaves, with_tails, even) + 2 * fewest < steps)
    whole = tl.where(divides, tiles - rest, tiles)
    return whole, own, tl.where(leaves, shared, even), tl.where(leaves, tail, 0), tails


@triton.jit
def _store_features(
    sum_cq, first, inside, rows, target_c, ignored_c, scale_c, coef_c, smoothing_c,
    weight_VD_ptr, total_weight_D_ptr, out_ptr, weight_stride, out_stride, D, factor,
):  # fmt: skip
    """Store the features from `first` on of rows of dX, from their product.

    `_input_gradient_kernel` in row_kernels.py has the formula of a row.
    """
    columns = first + tl.arange(0, sum_cq.shape[1])
    mask_cq = inside[:, None] & (columns < D)[None, :]
    weight_ptr = weight_VD_ptr + (target_c * weight_stride)[:, None] + columns[None, :]
    weight_cq = tl.load(weight_ptr, mask=mask_cq, other=0.0).to(tl.float32)
    grad_cq = sum_cq * scale_c[:, None] + coef_c[:, None] * weight_cq
    if total_weight_D_ptr is not None:
        total_q = tl.load(total_weight_D_ptr + columns, mask=columns < D, other=0.0)
        grad_cq -= smoothing_c[:, None] * total_q[None, :]
    grad_cq = tl.where(ignored_c[:, None], 0.0, grad_cq * factor)
    out_cq_ptr = out_ptr + (rows * out_stride)[:, None] + columns[None, :]
    tl.store(out_cq_ptr, grad_cq.to(out_ptr.dtype.element_ty), mask=mask_cq)


@triton.jit
def _row_vectors(
    places, counted, row_C_ptr, target_C_ptr, ignored_C_ptr, row_scale_C_ptr, target_weight_coef_ptr,
    smoothing_coef_C_ptr,
):  # fmt: skip
    """Return what `_store_features` takes of the rows at these places, and which of them count."""
    inside = places < counted
    rows = row_at(row_C_ptr, places, inside).to(tl.int64)
    target_c = tl.load(target_C_ptr + places, mask=inside, other=0)
    ignored_c = tl.load(ignored_C_ptr + places, mask=inside, other=1) != 0
    scale_c = tl.load(row_scale_C_ptr + places, mask=inside, other=0.0)
    coef_c = tl.load(target_weight_coef_ptr + rows, mask=inside, other=0.0)
    smoothing_c = coef_c
    if smoothing_coef_C_ptr is not None:
        smoothing_c = tl.load(smoothing_coef_C_ptr + places, mask=inside, other=0.0)
    return inside, rows, target_c, ignored_c, scale_c, coef_c, smoothing_c


@remember_launches
@triton.jit
def _input_gradient_product_kernel(
    exp_CV, weight_VD, weight_VD_ptr, target_C_ptr, ignored_C_ptr, row_scale_C_ptr,
    target_weight_coef_ptr, smoothing_coef_C_ptr, total_weight_D_ptr, factor_ptr, out_ptr,
    row_C_ptr, count_ptr, first_place, weight_stride, out_stride, C, D, V,
    PROGRAMS: tl.constexpr, FEWEST: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the tiles of dX that are whole.

    Grid: one program per multiprocessor, which takes tiles in turn.
    """
    counted = counted_rows(count_ptr, first_place, C)
    tiles_d = tl.cdiv(D, BLOCK_D)
    tiles_c = tl.cdiv(counted, BLOCK_C)
    whole, _, _, _, _ = _division(tiles_c * tiles_d, V, PROGRAMS, FEWEST, BLOCK_V)
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    for tile in tl.range(tl.program_id(0), whole, PROGRAMS, flatten=True):
        tile_c, tile_d = tile_at(tile, tiles_c, tiles_d, GROUP)
        sum_cd = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for start in range(0, V, BLOCK_V):
            exp_cv = exp_CV.load([tile_c * BLOCK_C, start])
            weight_vd = weight_VD.load([start, tile_d * BLOCK_D])
            sum_cd = tl.dot(exp_cv, weight_vd, sum_cd)
        row_vectors = _row_vectors(
            tile_c * BLOCK_C + tl.arange(0, BLOCK_C), counted, row_C_ptr, target_C_ptr, ignored_C_ptr,
            row_scale_C_ptr, target_weight_coef_ptr, smoothing_coef_C_ptr,
        )  # fmt: skip
        # Take a quarter of the features at a time, because what is loaded takes registers beside
        # the sum.
        halves_ch = halves(sum_cd)
        for part in tl.static_range(4):
            sum_cq = halves(halves_ch[part // 2])[part % 2]
            first = tile_d * BLOCK_D + part * (BLOCK_D // 4)
            _store_features(
                sum_cq, first, *row_vectors, weight_VD_ptr, total_weight_D_ptr, out_ptr, weight_stride,
                out_stride, D, factor,
            )  # fmt: skip


@remember_launches
@triton.jit
def _parts_kernel(
    exp_CV, weight_VD, part_ptr, count_ptr, first_place, C, D, V,
    PROGRAMS: tl.constexpr, FEWEST: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Store each part of the product of each tile that is divided.

    Grid: one program per multiprocessor. With r such tiles, part p of tile t lies at p r + t in the
    memory. The tail is the last part.
    """
    tiles_c, tiles_d = tl.cdiv(counted_rows(count_ptr, first_place, C), BLOCK_C), tl.cdiv(D, BLOCK_D)
    tiles, program, steps = tiles_c * tiles_d, tl.program_id(0), tl.cdiv(V, BLOCK_V)
    whole, own, part, tail, tails = _division(tiles, V, PROGRAMS, FEWEST, BLOCK_V)
    rest = tiles - whole
    number, count, begin, end = 0, 0, 0, steps
    if program < own * rest:
        number, count = program % rest, 1
        begin = tl.minimum(program // rest * part, steps - tail)
        end = tl.minimum(begin + part, steps - tail)
    elif tail > 0:
        number, begin = (program - own * rest) * tails, steps - tail
        count = tl.maximum(tl.minimum(tails, rest - number), 0)
    number_c, number_d = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_D)
    number_cd = number_c[:, None] * BLOCK_D + number_d[None, :]
    for each in range(number, number + count):
        tile_c, tile_d = tile_at(whole + each, tiles_c, tiles_d, GROUP)
        sum_cd = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for step in range(begin, end):
            exp_cv = exp_CV.load([tile_c * BLOCK_C, step * BLOCK_V])
            weight_vd = weight_VD.load([step * BLOCK_V, tile_d * BLOCK_D])
            sum_cd = tl.dot(exp_cv, weight_vd, sum_cd)
        place = tl.where(program < own * rest, program, own * rest + each)
        tl.store(part_ptr + place * (BLOCK_C * BLOCK_D) + number_cd, sum_cd)


@remember_launches
@triton.jit
def _sum_parts_kernel(
    part_ptr, weight_VD_ptr, target_C_ptr, ignored_C_ptr, row_scale_C_ptr, target_weight_coef_ptr,
    smoothing_coef_C_ptr, total_weight_D_ptr, factor_ptr, out_ptr, row_C_ptr, count_ptr, first_place,
    weight_stride, out_stride, C, D, V,
    PROGRAMS: tl.constexpr, FEWEST: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the rows of dX of each tile that is divided. Grid: (PROGRAMS, BLOCK_C / ROWS)."""
    counted = counted_rows(count_ptr, first_place, C)
    tiles_c, tiles_d = tl.cdiv(counted, BLOCK_C), tl.cdiv(D, BLOCK_D)
    tiles, number = tiles_c * tiles_d, tl.program_id(0)
    whole, own, part, tail, _ = _division(tiles, V, PROGRAMS, FEWEST, BLOCK_V)
    rest = tiles - whole
    if number < rest:
        factor = 1.0
        if factor_ptr is not None:
            factor = tl.load(factor_ptr)
        row_r, number_d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        number_rd = row_r[:, None] * BLOCK_D + number_d[None, :]
        sum_rd = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for each in range(tl.cdiv(tl.cdiv(V, BLOCK_V) - tail, part)):
            sum_rd += tl.load(part_ptr + (each * rest + number) * (BLOCK_C * BLOCK_D) + number_rd)
        if tail > 0:
            sum_rd += tl.load(part_ptr + (own * rest + number) * (BLOCK_C * BLOCK_D) + number_rd)
        tile_c, tile_d = tile_at(whole + number, tiles_c, tiles_d, GROUP)
        row_vectors = _row_vectors(
            tile_c * BLOCK_C + row_r, counted, row_C_ptr, target_C_ptr, ignored_C_ptr, row_scale_C_ptr,
            target_weight_coef_ptr, smoothing_coef_C_ptr,
        )  # fmt: skip
        _store_features(
            sum_rd, tile_d * BLOCK_D, *row_vectors, weight_VD_ptr, total_weight_D_ptr, out_ptr,
            weight_stride, out_stride, D, factor,
        )  # fmt: skip


def input_gradient(
    exp_CV: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    ignored_C: Tensor,
    row_scale_C: Tensor,
    target_weight_coef_N: Tensor,
    smoothing_coef_C: Tensor | None,
    total_weight_D: Tensor | None,
    factor: Tensor | None,
    out_ND: Tensor,
    counted: CountedChunk,
) -> None:
    """Write each row of dX that counts to its own row of out_ND."""
    (C, V), D, programs = exp_CV.shape, weight_VD.shape[1], multiprocessors(exp_CV.device)
    rows, width = cost_model.dx_tile(D)
    most_parts = cost_model.most_parts(C, D, V, programs)
    blocks = {
        **{"PROGRAMS": programs, "FEWEST": cost_model.FEWEST_CLASSES_OF_PART, "GROUP": GROUP},
        **{"BLOCK_C": rows, "BLOCK_D": width, "BLOCK_V": BLOCK_V},
    }
    operands = describe(exp_CV, rows, BLOCK_V), describe(weight_VD, BLOCK_V, width)
    of_rows = (
        weight_VD, target_C, ignored_C, row_scale_C, target_weight_coef_N, smoothing_coef_C, total_weight_D,
        factor, out_ND,
    )  # fmt: skip
    strides = weight_VD.stride(0), out_ND.stride(0)
    _input_gradient_product_kernel[(programs,)](
        *operands, *of_rows, *counted, *strides, C, D, V,
        **blocks, num_stages=STAGES, num_warps=WARPS,
    )  # fmt: skip
    if most_parts:
        parts = torch.empty(most_parts * rows * width, dtype=torch.float32, device=exp_CV.device)
        _parts_kernel[(programs,)](
            *operands, parts, *counted[1:], C, D, V,
            **blocks, num_stages=STAGES, num_warps=WARPS,
        )  # fmt: skip
        _sum_parts_kernel[(programs, rows // SUMMED_ROWS)](
            parts, *of_rows, *counted, *strides, C, D, V,
            **blocks, ROWS=SUMMED_ROWS, num_warps=WARPS,
        )  # fmt: skip
