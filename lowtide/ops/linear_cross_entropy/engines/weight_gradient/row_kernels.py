"""Hold Triton kernels of the exponentials engine that handle one row per program, and launch them.

exponentials/engine.py has the formulas, with the coefficients c (`row_scale`) and h
(`target_weight_coef`) of each row.

Shapes: D features, V classes; C tokens of a chunk; lower case = one tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows, row_at


@remember_launches
@triton.jit
def _gather_rows_kernel(
    x_ptr, row_C_ptr, count_ptr, first_place, out_CD_ptr, out_stride, outer_stride, inner_stride, inner, C, D,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows that count, and write zeros for the others. Grid: one program per row."""
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
    """Compute logit[c] = x[c] . weight[target[c]]. Grid: one program per row.

    The logit is 0 for a target of -1, and in rows that do not count. If reference_C_ptr is given,
    the row's reference becomes the logit, or infinity in an ignored row. If marks_ptr is given, the
    marks of all row tiles, of HEIGHT rows each, are cleared.
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
def factor_or_one(factor_ptr):
    """Return the factor, or 1 without a pointer."""
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
    """Compute out[c] = factor row_scale[c] x[c]. Grid: one program per row.

    Where factor row_scale[c] is 0, out[c] is 0 even if x[c] is not finite. Rows that do not count
    are not written.
    """
    row = tl.program_id(0).to(tl.int64)
    if row < counted_rows(count_ptr, first_place, C):
        scale = tl.load(row_scale_C_ptr + row) * factor_or_one(factor_ptr)
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

    total_weight is the sum of the weight's rows, each times its class weight. For a target of -1
    the term with the target's weight is 0. Ignored rows are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    scale, target_weight_coef, ignored = (
        tl.load(row_scale_C_ptr + row),
        tl.load(target_weight_coef_C_ptr + row),
        tl.load(ignored_C_ptr + row),
    )
    target, factor = tl.load(target_C_ptr + row), factor_or_one(factor_ptr)
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
    """Write the dot product of each row of x and its target's weight to logit_C.

    If reference_C is given, it gets the same numbers, but infinity in ignored rows. If the marks of
    the row tiles (exponentials/recompute.py) are given, they are cleared.
    """
    C, D = x_CD.shape
    _target_logits_kernel[(C,)](
        x_CD, weight_VD, target_C, ignored_C, logit_C, reference_C, marks, *counted[1:], x_CD.stride(0),
        weight_VD.stride(0), C, D, HEIGHT=tiles.BLOCK_C, BLOCK=block_width(D),
    )  # fmt: skip


def gather_rows(out_CD: Tensor, x: Tensor, counted: CountedChunk) -> None:
    """Copy the chunk's rows of x to out_CD, with zeros for rows that do not count.

    x is [N, D], or [outer, inner, D] if it has no view [N, D].
    """
    C, D = out_CD.shape
    _gather_rows_kernel[(C,)](
        x, *counted, out_CD, out_CD.stride(0), *row_strides(x), C, D, BLOCK=block_width(D)
    )  # fmt: skip


def clear_rows(matrix: Tensor, counted: CountedChunk) -> None:
    """Write zeros to the chunk's rows of the matrix that do not count."""
    C = matrix.shape[0]
    _clear_rows_kernel[(C,)](
        matrix, *counted, matrix.stride(0), C, matrix.shape[1], BLOCK=min(1024, block_width(matrix.shape[1]))
    )  # fmt: skip


def scale_rows(
    x_CD: Tensor, row_scale_C: Tensor, factor: Tensor | None, out_CD: Tensor, counted: CountedChunk = ALL
) -> None:
    """Write factor row_scale_C x_CD to out_CD, which may be x_CD; a factor of None means 1."""
    C, D = x_CD.shape
    _scale_rows_kernel[(C,)](
        x_CD, row_scale_C, factor, out_CD, *counted[1:], x_CD.stride(0), out_CD.stride(0), C, D,
        BLOCK=block_width(D),
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
        BLOCK=block_width(D),
    )


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the outer and the inner stride of rows, and the number of rows per outer stride."""
    return (x.stride(0) if x.dim() == 3 else 0, x.stride(-2), x.shape[-2])


def block_width(D: int) -> int:
    """Return the width of the blocks in which a kernel reads a row of D features."""
    return min(1024, next_power_of_2(D))
