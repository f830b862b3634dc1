"""Hold small Triton kernels of the exponentials engine that handle a row each, and their launchers.

They compute what its GEMMs do not: exponentials/engine.py has the formulas.

Shapes: N tokens, D features, P pairs of them, V classes; C tokens of a chunk, B classes of a block;
lower case = one tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv, next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows, row_at
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.packed_triton import (
    load_pairs,
    store_pairs,
)


@remember_launches
@triton.jit
def _gather_rows_kernel(
    x_ptr, row_C_ptr, count_ptr, first_place, out_CD_ptr, out_stride, outer_stride, inner_stride, inner, C, D,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows that count, and write zeros as the others. Grid: one program per row."""
    place = tl.program_id(0).to(tl.int64)
    read = tl.where(place < counted_rows(count_ptr, first_place, C), D, 0)
    row = tl.load(row_C_ptr + place)
    x_ptr += row // inner * outer_stride + row % inner * inner_stride
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x_d = tl.load(x_ptr + columns, mask=columns < read, other=0.0)
        tl.store(
            out_CD_ptr + place * out_stride + columns, x_d.to(out_CD_ptr.dtype.element_ty), mask=columns < D
        )


@remember_launches
@triton.jit
def _clear_rows_kernel(
    matrix_ptr, row_C_ptr, count_ptr, first_place, stride, C, D, BLOCK: tl.constexpr
):  # fmt: skip
    """Write zeros to the rows that do not count. Grid: one program per row."""
    place = tl.program_id(0).to(tl.int64)
    if place >= counted_rows(count_ptr, first_place, C):
        row = row_at(row_C_ptr, place, place < C)
        for start in range(0, D, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            zero = tl.zeros((BLOCK,), matrix_ptr.dtype.element_ty)
            tl.store(matrix_ptr + row * stride + columns, zero, mask=columns < D)


@remember_launches
@triton.jit
def _target_logits_kernel(
    x_CD_ptr, weight_VD_ptr, target_C_ptr, ignored_C_ptr, logit_C_ptr, reference_C_ptr, marks_ptr,
    count_ptr, first_place, x_stride, weight_stride, C, D, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute logit[c] = x[c] . weight[target[c]], 0 for a target of -1. Grid: one program per row.

    The same becomes the reference of the row if that has a pointer, or infinity if it is ignored.
    The marks of all row tiles, each HEIGHT rows, are cleared. The logit of rows that do not count is 0.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_C_ptr + row)
    here = tl.where(target < 0, 0, D)
    dot_d = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tl.where(row < counted_rows(count_ptr, first_place, C), D, 0), BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x_d = tl.load(x_CD_ptr + row * x_stride + columns, mask=columns < D, other=0.0)
        weight_d = tl.load(weight_VD_ptr + target * weight_stride + columns, mask=columns < here, other=0.0)
        dot_d += x_d.to(tl.float32) * weight_d.to(tl.float32)
    logit = tl.sum(dot_d, 0)
    tl.store(logit_C_ptr + row, logit)
    if reference_C_ptr is not None:
        ignored = tl.load(ignored_C_ptr + row) != 0
        tl.store(reference_C_ptr + row, tl.where(ignored, float("inf"), logit))
    if marks_ptr is not None:
        tl.store(marks_ptr, 0, mask=row == 0)
        tl.store(marks_ptr + 1 + row // HEIGHT, 0, mask=row % HEIGHT == 0)


@triton.jit
def _factor(factor_ptr):
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    return factor


@remember_launches
@triton.jit
def _scale_rows_kernel(
    x_CD_ptr, row_scale_C_ptr, factor_ptr, out_CD_ptr, count_ptr, first_place, x_stride, out_stride, C, D,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out[c] = factor row_scale[c] x[c], 0 where that scale is 0. Grid: one program per row.

    Rows that do not count are left as they are.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < counted_rows(count_ptr, first_place, C):
        scale = tl.load(row_scale_C_ptr + row) * _factor(factor_ptr)
        for start in range(0, D, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x_d = tl.load(x_CD_ptr + row * x_stride + columns, mask=columns < D, other=0.0).to(tl.float32)
            x_d = tl.where(scale == 0.0, 0.0, x_d * scale)
            tl.store(
                out_CD_ptr + row * out_stride + columns,
                x_d.to(out_CD_ptr.dtype.element_ty),
                mask=columns < D,
            )


@remember_launches
@triton.jit
def _input_gradient_kernel(
    product_CD_ptr,
    weight_VD_ptr,
    target_C_ptr,
    ignored_C_ptr,
    row_scale_C_ptr,
    target_weight_coef_C_ptr,
    smoothing_coef_C_ptr,
    total_weight_D_ptr,
    factor_ptr,
    out_CD_ptr,
    weight_stride,
    out_stride,
    D,
    BLOCK: tl.constexpr,
):
    """Compute rows of dX from the GEMM's result. Grid: one program per row.

    out[c] = factor (row_scale[c] product[c] + target_weight_coef[c] weight[target[c]]
                     - smoothing_coef[c] total_weight)

    A target of -1 has no weight here.
    """
    row = tl.program_id(0).to(tl.int64)
    scale, target_weight_coef, ignored = (
        tl.load(row_scale_C_ptr + row),
        tl.load(target_weight_coef_C_ptr + row),
        tl.load(ignored_C_ptr + row),
    )
    target, factor = tl.load(target_C_ptr + row), _factor(factor_ptr)
    here = tl.where(target < 0, 0, D)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        sum_d = tl.load(product_CD_ptr + row * D + columns, mask=columns < D, other=0.0) * scale
        weight_d = tl.load(weight_VD_ptr + target * weight_stride + columns, mask=columns < here, other=0.0)
        grad_d = sum_d + target_weight_coef * weight_d.to(tl.float32)
        if smoothing_coef_C_ptr is not None:
            total_d = tl.load(total_weight_D_ptr + columns, mask=columns < D, other=0.0)
            grad_d -= tl.load(smoothing_coef_C_ptr + row) * total_d
        grad_d = tl.where(ignored, 0.0, grad_d * factor)
        tl.store(
            out_CD_ptr + row * out_stride + columns, grad_d.to(out_CD_ptr.dtype.element_ty), mask=columns < D
        )


@triton.jit
def _with_target_rows(
    sum_d,
    target,
    first,
    columns,
    x_ptr,
    target_weight_coef_N_ptr,
    factor,
    class_N_ptr,
    order_N_ptr,
    outer_stride,
    inner_stride,
    inner,
    N,
    D,
    BLOCK_N: tl.constexpr,
):
    """Return sum + factor target_weight_coef[n] x[n] over the rows n with that target.

    The classes are sorted, with their rows in `order`; this class begins at `first`. Rows are added
    in that order, so the result has the same bits every time.
    """
    row = tl.load(order_N_ptr + first).to(tl.int64)
    x_d = tl.load(
        x_ptr + row // inner * outer_stride + row % inner * inner_stride + columns,
        mask=columns < D,
        other=0.0,
    )
    sum_d += tl.load(target_weight_coef_N_ptr + row) * factor * x_d.to(tl.float32)
    # Most classes have only that row. A frequent class may have thousands, taken BLOCK_N at a time.
    start = first + 1
    after = tl.load(class_N_ptr + tl.minimum(start, N - 1))
    same = ((start < N) & (after == target)).to(tl.int32)
    while same > 0:
        place_n = start + tl.arange(0, BLOCK_N)
        same_n = (place_n < N) & (tl.load(class_N_ptr + place_n, mask=place_n < N, other=-1) == target)
        row_n = tl.load(order_N_ptr + place_n, mask=same_n, other=0).to(tl.int64)
        coef_n = tl.load(target_weight_coef_N_ptr + row_n, mask=same_n, other=0.0) * factor
        x_nd = tl.load(
            x_ptr
            + (row_n // inner * outer_stride + row_n % inner * inner_stride)[:, None]
            + columns[None, :],
            mask=same_n[:, None] & (columns[None, :] < D),
            other=0.0,
        )
        sum_d += tl.sum(coef_n[:, None] * x_nd.to(tl.float32), 0)
        start += BLOCK_N
        same = tl.min(same_n.to(tl.int32), 0)
    return sum_d


@remember_launches
@triton.jit
def _add_target_rows_kernel(
    x_ptr,
    target_weight_coef_N_ptr,
    factor_ptr,
    class_N_ptr,
    order_N_ptr,
    sum_VD_ptr,
    low_VP_ptr,
    sum_TD_ptr,
    outer_stride,
    inner_stride,
    inner,
    N,
    D,
    first_target,
    V,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add factor target_weight_coef[n] x[n] of the rows n with target v to sum[v].

    Grid: (T, D / BLOCK). With low_VP_ptr the sum is packed as in packed_triton.py. The program at
    the first row of a class adds all its rows. With sum_TD, the previous sum is read from there, at
    the place of that row, for the targets from first_target on. T = N without sum_TD.
    """
    first = first_target + tl.program_id(0)
    target = tl.load(class_N_ptr + first)
    before = tl.load(class_N_ptr + tl.maximum(first - 1, 0))
    head = (first == 0) | (before != target)
    if head & (target < V):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = target.to(tl.int64) * D + columns
        if sum_TD_ptr is not None:
            place_td = tl.program_id(0).to(tl.int64) * D + columns
            sum_d = tl.load(sum_TD_ptr + place_td, mask=columns < D, other=0.0)
        elif low_VP_ptr is None:
            sum_d = tl.load(sum_VD_ptr + place, mask=columns < D, other=0.0)
        else:
            pairs = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            place_p = target.to(tl.int64) * (D // 2) + pairs
            pair_ptr, low_ptr = sum_VD_ptr + place_p, low_VP_ptr + place_p
            even_p, odd_p = load_pairs(pair_ptr, low_ptr, pairs < D // 2)
            sum_d = tl.interleave(even_p, odd_p)
        sum_d = _with_target_rows(
            sum_d, target, first, columns, x_ptr, target_weight_coef_N_ptr, _factor(factor_ptr), class_N_ptr,
            order_N_ptr, outer_stride, inner_stride, inner, N, D, BLOCK_N,
        )  # fmt: skip
        if low_VP_ptr is None:
            tl.store(sum_VD_ptr + place, sum_d.to(sum_VD_ptr.dtype.element_ty), mask=columns < D)
        else:
            even_p, odd_p = tl.split(tl.reshape(sum_d, (BLOCK // 2, 2)))
            store_pairs(pair_ptr, low_ptr, even_p, odd_p, pairs < D // 2)


@remember_launches
@triton.jit
def _round_block_kernel(
    sum_BD_ptr,
    x_ptr,
    target_weight_coef_N_ptr,
    class_N_ptr,
    order_N_ptr,
    first_V_ptr,
    class_weight_V_ptr,
    smoothing_row_D_ptr,
    factor_ptr,
    out_VD_ptr,
    outer_stride,
    inner_stride,
    inner,
    N,
    D,
    first_class,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a block of the gradient from the block's sum. Grid: (B, D / BLOCK).

    out[v] = factor (sum[v - first_class]
                     + sum over rows n with target v of target_weight_coef[n] x[n]
                     - class_weight[v] smoothing_coef)

    first_V is where each class begins among the sorted targets; N for a class that is no target.
    """
    target = first_class + tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * D + columns
    sum_d = tl.load(sum_BD_ptr + place, mask=columns < D, other=0.0)
    first = tl.load(first_V_ptr + target)
    if first < N:
        sum_d = _with_target_rows(
            sum_d, target, first, columns, x_ptr, target_weight_coef_N_ptr, 1.0, class_N_ptr, order_N_ptr,
            outer_stride, inner_stride, inner, N, D, BLOCK_N,
        )  # fmt: skip
    if smoothing_row_D_ptr is not None:
        smoothing_d = tl.load(smoothing_row_D_ptr + columns, mask=columns < D, other=0.0)
        if class_weight_V_ptr is not None:
            smoothing_d *= tl.load(class_weight_V_ptr + target)
        sum_d -= smoothing_d
    sum_d *= tl.load(factor_ptr)
    place = target.to(tl.int64) * D + columns
    tl.store(out_VD_ptr + place, sum_d.to(out_VD_ptr.dtype.element_ty), mask=columns < D)


def target_logits(
    x_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    logit_C: Tensor,
    *,
    ignored_C: Tensor | None = None,
    reference_C: Tensor | None = None,
    marks: Tensor | None = None,
    counted: CountedChunk = ALL,
) -> None:
    """Write the dot product of each row with its target's weight to logit_C.

    reference_C gets the same, or infinity in ignored rows. The marks of the row tiles
    (exponentials/recompute.py) are cleared.
    """
    C, D = x_CD.shape
    _target_logits_kernel[(C,)](
        x_CD, weight_VD, target_C, ignored_C, logit_C, reference_C, marks, *counted[1:], x_CD.stride(0),
        weight_VD.stride(0), C, D, HEIGHT=tiles.BLOCK_C, BLOCK=_width(D),
    )  # fmt: skip


def gather_rows(out_CD: Tensor, x: Tensor, counted: CountedChunk) -> None:
    """Copy a chunk's rows to out_CD, with zeros as the rows that do not count.

    x is [N, D], or [outer, inner, D] if it has no view [N, D].
    """
    C, D = out_CD.shape
    _gather_rows_kernel[(C,)](
        x, *counted, out_CD, out_CD.stride(0), *_strides(x), C, D, BLOCK=_width(D)
    )  # fmt: skip


def clear_rows(matrix: Tensor, counted: CountedChunk) -> None:
    """Write zeros to the chunk's rows that do not count."""
    C = matrix.shape[0]
    _clear_rows_kernel[(C,)](
        matrix, *counted, matrix.stride(0), C, matrix.shape[1], BLOCK=min(1024, _width(matrix.shape[1]))
    )  # fmt: skip


def scale_rows(
    x_CD: Tensor,
    row_scale_C: Tensor,
    factor: Tensor | None,
    out_CD: Tensor,
    counted: CountedChunk = ALL,
) -> None:
    """Write factor row_scale_C x_CD to out_CD, which may be x_CD; without a factor it is 1."""
    C, D = x_CD.shape
    _scale_rows_kernel[(C,)](
        x_CD, row_scale_C, factor, out_CD, *counted[1:], x_CD.stride(0), out_CD.stride(0), C, D,
        BLOCK=_width(D),
    )  # fmt: skip


def input_gradient(
    product_CD: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    ignored_C: Tensor,
    row_scale_C: Tensor,
    target_weight_coef_C: Tensor,
    smoothing_coef_C: Tensor | None,
    total_weight_D: Tensor | None,
    factor: Tensor | None,
    out_CD: Tensor,
) -> None:
    """Write the rows of dX to out_CD; `_input_gradient_kernel` has the formula."""
    C, D = product_CD.shape
    _input_gradient_kernel[(C,)](
        product_CD,
        weight_VD,
        target_C,
        ignored_C,
        row_scale_C,
        target_weight_coef_C,
        smoothing_coef_C,
        total_weight_D,
        factor,
        out_CD,
        weight_VD.stride(0),
        out_CD.stride(0),
        D,
        BLOCK=_width(D),
    )


def add_target_rows(
    sum_VD: Tensor,
    low_VP: Tensor | None,
    x: Tensor,
    target_weight_coef_N: Tensor,
    class_N: Tensor,
    order_N: Tensor,
    *,
    factor: Tensor | None = None,
    sums_TD: Tensor | None = None,
    first_target: int = 0,
) -> None:
    """Add factor target_weight_coef[n] x[n] to the sum of each row's target class.

    The targets are sorted by class; ignored rows come last, under a class of their own. x is [N,
    D], or [outer, inner, D] if it has no view [N, D].
    """
    N, D = class_N.shape[0], x.shape[-1]
    T = N if sums_TD is None else sums_TD.shape[0]
    block = min(512, _width(D))
    _add_target_rows_kernel[(T, cdiv(D, block))](
        x,
        target_weight_coef_N,
        factor,
        class_N,
        order_N,
        sum_VD,
        low_VP,
        sums_TD,
        *_strides(x),
        N,
        D,
        first_target,
        sum_VD.shape[0],
        BLOCK_N=16,
        BLOCK=block,
    )


def round_block(
    out_VD: Tensor,
    sum_BD: Tensor,
    factor: Tensor,
    x: Tensor,
    target_weight_coef_N: Tensor,
    class_N: Tensor,
    order_N: Tensor,
    first_V: Tensor,
    class_weight_V: Tensor | None,
    smoothing_row_D: Tensor | None,
    *,
    first_class: int,
) -> None:
    """Round the sum of the block of classes from first_class on into the weight gradient."""
    (B, D), N = sum_BD.shape, class_N.shape[0]
    block = _width(D)  # half as wide, the kernel reached half of the memory's speed
    _round_block_kernel[(B, cdiv(D, block))](
        sum_BD,
        x,
        target_weight_coef_N,
        class_N,
        order_N,
        first_V,
        class_weight_V,
        smoothing_row_D,
        factor,
        out_VD,
        *_strides(x),
        N,
        D,
        first_class,
        BLOCK_N=16,
        BLOCK=block,
    )


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Return the outer and the inner stride of rows, and the number of rows per outer one."""
    return (x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.shape[-2])


def _width(D: int) -> int:
    """Return the width of the blocks in which a row is read."""
    return min(1024, next_power_of_2(D))
