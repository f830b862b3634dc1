"""Add the target rows to a weight gradient in Triton, and round a block of its classes.

Each row n of X, times its coefficient target_weight_coef[n], is added to the class that is its
target. The targets are sorted by class, so that one program adds all rows of a class, in a fixed
order. class_N holds the sorted targets, and order_N the row of each.

Shapes: N tokens, D features, P pairs of features, V classes; B classes of a block; T targets
whose sums are in a buffer of their own; lower case = one tile.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.packed_triton import (
    load_pairs,
    store_pairs,
)
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.row_kernels import (
    block_width,
    factor_or_one,
    row_strides,
)


@triton.jit
def _row_and_next_class(class_N_ptr, order_N_ptr, first, N):
    """Return the row at place `first` of the order, and the class of the next place."""
    return tl.load(order_N_ptr + first).to(tl.int64), tl.load(class_N_ptr + tl.minimum(first + 1, N - 1))


@triton.jit
def _with_target_rows(
    sum_d,
    target,
    first,
    row,
    after,
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
    """Return sum_d plus factor target_weight_coef[n] x[n] of all rows n with that target.

    The target's rows begin with `row`, at place `first` of order_N; `after` is the class of the
    next place. They are added in that order, so the result has the same bits every time.
    """
    x_d = tl.load(
        x_ptr + row // inner * outer_stride + row % inner * inner_stride + columns,
        mask=columns < D,
        other=0.0,
    )
    sum_d += tl.load(target_weight_coef_N_ptr + row) * factor * x_d.to(tl.float32)
    # Most targets have a single row. A frequent class may have thousands, added BLOCK_N at a time.
    # The numbers of the next rows are read before these rows are waited for.
    if (first + 1 < N) & (after == target):
        place_n = first + 1 + tl.arange(0, BLOCK_N)
        same_n, row_n = _rows_of(target, place_n, class_N_ptr, order_N_ptr, N)
        same = 1
        while same > 0:
            coef_n = tl.load(target_weight_coef_N_ptr + row_n, mask=same_n, other=0.0) * factor
            x_nd = tl.load(
                x_ptr
                + (row_n // inner * outer_stride + row_n % inner * inner_stride)[:, None]
                + columns[None, :],
                mask=same_n[:, None] & (columns[None, :] < D),
                other=0.0,
            )
            place_n += BLOCK_N
            same_n, row_n = _rows_of(target, place_n, class_N_ptr, order_N_ptr, N)
            same = tl.max(same_n.to(tl.int32), 0)
            sum_d += tl.sum(coef_n[:, None] * x_nd.to(tl.float32), 0)
    return sum_d


@triton.jit
def _rows_of(target, place_n, class_N_ptr, order_N_ptr, N):
    """Return whether each place has this target, and its row."""
    class_n = tl.load(class_N_ptr + place_n, mask=place_n < N, other=-1)
    row_n = tl.load(order_N_ptr + place_n, mask=place_n < N, other=0).to(tl.int64)
    return class_n == target, row_n


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

    Grid: (T, D / BLOCK). Each program handles one target of class_N, from first_target on. At the
    first target of a class it adds all rows of the class, and at the others it does nothing.

    With low_VP_ptr, the sum is packed as in packed_triton.py. With sum_TD_ptr, the previous sum is
    read from the target's row of sum_TD instead of sum_VD. Without sum_TD_ptr, T is N.
    """
    first = first_target + tl.program_id(0)
    target = tl.load(class_N_ptr + first)
    before = tl.load(class_N_ptr + tl.maximum(first - 1, 0))
    # These are loaded before the branch, so that the program waits for memory once.
    row, after = _row_and_next_class(class_N_ptr, order_N_ptr, first, N)
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
            sum_d, target, first, row, after, columns, x_ptr, target_weight_coef_N_ptr,
            factor_or_one(factor_ptr), class_N_ptr, order_N_ptr, outer_stride, inner_stride, inner, N, D,
            BLOCK_N,
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
                     - class_weight[v] smoothing_row)

    smoothing_row is the sum over rows of smoothing_coef x. first_V holds the place in class_N where
    each class begins, or N for a class that is no target.
    """
    target = first_class + tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = tl.program_id(0).to(tl.int64) * D + columns
    sum_d = tl.load(sum_BD_ptr + place, mask=columns < D, other=0.0)
    first = tl.load(first_V_ptr + target)
    if first < N:
        row, after = _row_and_next_class(class_N_ptr, order_N_ptr, first, N)
        sum_d = _with_target_rows(
            sum_d, target, first, row, after, columns, x_ptr, target_weight_coef_N_ptr, 1.0, class_N_ptr,
            order_N_ptr, outer_stride, inner_stride, inner, N, D, BLOCK_N,
        )  # fmt: skip
    if smoothing_row_D_ptr is not None:
        smoothing_d = tl.load(smoothing_row_D_ptr + columns, mask=columns < D, other=0.0)
        if class_weight_V_ptr is not None:
            smoothing_d *= tl.load(class_weight_V_ptr + target)
        sum_d -= smoothing_d
    sum_d *= tl.load(factor_ptr)
    place = target.to(tl.int64) * D + columns
    tl.store(out_VD_ptr + place, sum_d.to(out_VD_ptr.dtype.element_ty), mask=columns < D)


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
    """Add factor target_weight_coef[n] x[n] of each row n to the sum of the row's target class.

    The targets are sorted by class; ignored rows come last, as class V. x is [N, D], or [outer,
    inner, D] if it has no view [N, D]. With sums_TD, the previous sums of T targets from
    first_target on are read from sums_TD, and the new sums are written to sum_VD.
    """
    N, D = class_N.shape[0], x.shape[-1]
    T = N if sums_TD is None else sums_TD.shape[0]
    # With more rows at a time, registers leave too few programs to hide the wait for memory. With
    # fewer, a frequent class takes longer (decision 0074).
    block = min(512, block_width(D))
    _add_target_rows_kernel[(T, cdiv(D, block))](
        x,
        target_weight_coef_N,
        factor,
        class_N,
        order_N,
        sum_VD,
        low_VP,
        sums_TD,
        *row_strides(x),
        N,
        D,
        first_target,
        sum_VD.shape[0],
        BLOCK_N=8,
        BLOCK=block,
        num_warps=2,
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
    """Write a block of the weight gradient from first_class on, rounded from its sum.

    `_round_block_kernel` has the formula.
    """
    (B, D), N = sum_BD.shape, class_N.shape[0]
    block = block_width(D)  # with half this width the kernel reached half of the memory bandwidth
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
        *row_strides(x),
        N,
        D,
        first_class,
        BLOCK_N=16,
        BLOCK=block,
    )
