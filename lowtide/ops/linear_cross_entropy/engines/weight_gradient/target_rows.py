"""Add the target rows to a weight gradient in Triton, and round a block of its classes.

Each row n of X, times its coefficient target_weight_coef[n], is added to the class that is its
target. The targets are sorted by class, so that one program adds all rows of a class, in a fixed
order. class_N holds the sorted targets, and order_N the row of each.

Shapes: N tokens, D features, P pairs of features, V classes; B classes of a block; lower case = one
tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.packed_triton import (
    load_pairs,
    rounded_pairs,
    store_pairs,
)
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.row_kernels import (
    block_width,
    factor_or_one,
    row_strides,
)

PLACES = 512  # classes or targets per program of the kernels that find and gather them


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
    beside_ptr,
    outer_stride,
    inner_stride,
    inner,
    N,
    D,
    V,
    BY_PLACE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add factor target_weight_coef[n] x[n] of the rows n with target v to sum[v].

    Grid: (N, D / BLOCK). Each program handles one place of class_N. At the first place of a class
    it adds all rows of the class, and at the others it does nothing.

    `add_target_rows` says what sum and beside_ptr hold.
    """
    first = tl.program_id(0)
    target = tl.load(class_N_ptr + first)
    before = tl.load(class_N_ptr + tl.maximum(first - 1, 0))
    # These are loaded before the branch, so that the program waits for memory once.
    row, after = _row_and_next_class(class_N_ptr, order_N_ptr, first, N)
    head = (first == 0) | (before != target)
    if head & (target < V):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        place = target.to(tl.int64) * D + columns
        row_beside = (first if BY_PLACE else target).to(tl.int64)
        PACKED: tl.constexpr = beside_ptr is not None and sum_VD_ptr.dtype.element_ty == tl.int32
        if PACKED:
            pairs = tl.program_id(1) * (BLOCK // 2) + tl.arange(0, BLOCK // 2)
            pair_ptr = sum_VD_ptr + target.to(tl.int64) * (D // 2) + pairs
            bits_ptr = beside_ptr + row_beside * (D // 2) + pairs
            even_p, odd_p = load_pairs(pair_ptr, bits_ptr, pairs < D // 2)
            sum_d = tl.interleave(even_p, odd_p)
        elif BY_PLACE:
            sum_d = tl.load(beside_ptr + row_beside * D + columns, mask=columns < D, other=0.0)
        else:
            sum_d = tl.load(sum_VD_ptr + place, mask=columns < D, other=0.0)
        sum_d = _with_target_rows(
            sum_d, target, first, row, after, columns, x_ptr, target_weight_coef_N_ptr,
            factor_or_one(factor_ptr), class_N_ptr, order_N_ptr, outer_stride, inner_stride, inner, N, D,
            BLOCK_N,
        )  # fmt: skip
        if not PACKED:
            tl.store(sum_VD_ptr + place, sum_d.to(sum_VD_ptr.dtype.element_ty), mask=columns < D)
        else:
            even_p, odd_p = tl.split(tl.reshape(sum_d, (BLOCK // 2, 2)))
            if BY_PLACE:
                tl.store(pair_ptr, rounded_pairs(even_p, odd_p, 1.0), mask=pairs < D // 2)
            else:
                store_pairs(pair_ptr, bits_ptr, even_p, odd_p, pairs < D // 2)


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


@remember_launches
@triton.jit(do_not_specialize=["N", "half"])
def _first_places_kernel(class_N_ptr, first_V_ptr, N, V, half, BLOCK: tl.constexpr):
    """Write the place at which each class begins, or N if it is no target. Grid: (V / BLOCK,).

    The number of smaller classes is found bit by bit; `half` is the largest power of two up to N.
    """
    class_v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place_v = tl.zeros((BLOCK,), tl.int32)
    step = half
    while step > 0:
        next_v = place_v + step
        last_v = tl.load(class_N_ptr + next_v - 1, mask=next_v <= N, other=V)
        place_v = tl.where(last_v < class_v, next_v, place_v)
        step = step // 2
    found_v = tl.load(class_N_ptr + place_v, mask=place_v < N, other=V)
    tl.store(first_V_ptr + class_v, tl.where(found_v == class_v, place_v, N), mask=class_v < V)


def first_places(class_N: Tensor, V: int) -> Tensor:
    """Return the place of each class in the sorted targets class_N; N for a class that is none."""
    N = class_N.shape[0]
    first_V = torch.empty(V, dtype=torch.int32, device=class_N.device)
    half = 1 << (N.bit_length() - 1) if N else 0
    _first_places_kernel[(cdiv(V, PLACES),)](class_N, first_V, N, V, half, BLOCK=PLACES)
    return first_V


@remember_launches
@triton.jit
def _gather_targets_kernel(exp_CV_ptr, class_N_ptr, out_CT_ptr, stride, N, V, T, BLOCK: tl.constexpr):
    """Copy the columns of exp that are targets. Grid: (C, T / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    place_t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    class_t = tl.minimum(tl.load(class_N_ptr + place_t, mask=place_t < N, other=V), V - 1)
    exp_t = tl.load(exp_CV_ptr + row * stride + class_t, mask=place_t < T, other=0.0)
    tl.store(out_CT_ptr + row * T + place_t, exp_t, mask=place_t < T)


def gather_targets(exp_CV: Tensor, class_N: Tensor, T: int) -> Tensor:  # [C, T]
    """Return the columns of exp that the sorted targets name, and others that nothing reads.

    The column of an ignored row, which has no class, is any one, and so are those beyond N. The
    columns of exp lie side by side.
    """
    (C, V), N = exp_CV.shape, class_N.shape[0]
    out_CT = torch.empty(C, T, dtype=exp_CV.dtype, device=exp_CV.device)
    _gather_targets_kernel[(C, cdiv(T, PLACES))](
        exp_CV, class_N, out_CT, exp_CV.stride(0), N, V, T, BLOCK=PLACES
    )
    return out_CT


def add_target_rows(
    sum: Tensor,
    beside: Tensor | None,
    x: Tensor,
    target_weight_coef_N: Tensor,
    class_N: Tensor,
    order_N: Tensor,
    *,
    factor: Tensor | None = None,
    by_place: bool = False,
) -> None:
    """Add factor target_weight_coef[n] x[n] of each row n to the sum of the row's target class.

    The targets are sorted by class; ignored rows come last, as class V. x is [N, D], or [outer,
    inner, D] if it has no view [N, D]. The sum is one of these:

        sum        beside      by_place
        float32    None                   the sum, [V, D]
        pairs      low bits               the packed sum, both [V, P]
        pairs      low bits    True       beside is [N, P]; the result is rounded to the gradient
        gradient   float32     True       beside is [N, D] and has the sum; the result is rounded

    `by_place`: row n of `beside` is that of place n in the order. The first place of each class is
    read.
    """
    N, D = class_N.shape[0], x.shape[-1]
    # With more rows at a time, registers leave too few programs to hide the wait for memory. With
    # fewer, a frequent class takes longer (decision 0074).
    block = min(512, block_width(D))
    _add_target_rows_kernel[(N, cdiv(D, block))](
        x, target_weight_coef_N, factor, class_N, order_N, sum, beside, *row_strides(x), N, D, sum.shape[0],
        BY_PLACE=by_place, BLOCK_N=8, BLOCK=block, num_warps=2,
    )  # fmt: skip


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
        sum_BD, x, target_weight_coef_N, class_N, order_N, first_V, class_weight_V, smoothing_row_D, factor,
        out_VD, *row_strides(x), N, D, first_class, BLOCK_N=16, BLOCK=block,
    )  # fmt: skip
