"""Compute an order of a call's rows in which ignored ones come last, and read it, in Triton.

counted_rows.py says what this order is for. Rows that count keep their order, and so do ignored
rows.

Shapes: N tokens; C tokens of a chunk; lower case = one tile, b the labels that a program orders, w
those that it counts at a time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import CountedRows

# Labels that a program orders, labels that it counts at a time, and warps of a program.
BLOCK, WIDTH, WARPS = 1024, 4096, 8


@triton.jit
def counted_rows(count_ptr, first_place, C):
    """Return how many of a chunk's C rows count; these are its first rows."""
    if count_ptr is None:
        return C
    else:
        return tl.minimum(tl.maximum(tl.load(count_ptr) - first_place, 0), C)


@triton.jit
def row_at(row_C_ptr, places, inside):
    """Return the rows at these places of a chunk; without row_C_ptr, the places."""
    if row_C_ptr is None:
        return places
    else:
        return tl.load(row_C_ptr + places, mask=inside, other=0)


@remember_launches
@triton.jit(do_not_specialize=["N", "ignore_index"])
def _order_rows_kernel(
    label_N_ptr, row_N_ptr, place_N_ptr, count_ptr, N, label_stride, ignore_index,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the rows in order, the place of each, and the count. Grid: (N / BLOCK,).

    Each program counts all rows itself, which takes less time than waiting for other programs.
    """
    first = tl.program_id(0) * BLOCK
    total_w = tl.zeros((WIDTH,), tl.int32)
    before_w = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, N, WIDTH):
        row_w = start + tl.arange(0, WIDTH)
        counts_w = _counts(label_N_ptr, row_w, N, label_stride, ignore_index).to(tl.int32)
        total_w += counts_w
        before_w += tl.where(row_w < first, counts_w, 0)
    total, before = tl.sum(total_w, 0), tl.sum(before_w, 0)
    row_b = first + tl.arange(0, BLOCK)
    counts_b = _counts(label_N_ptr, row_b, N, label_stride, ignore_index)
    before_b = before + tl.cumsum(counts_b.to(tl.int32), 0) - counts_b.to(tl.int32)
    place_b = tl.where(counts_b, before_b, total + row_b - before_b).to(tl.int64)
    tl.store(place_N_ptr + row_b, place_b, mask=row_b < N)
    tl.store(row_N_ptr + place_b, row_b.to(tl.int64), mask=row_b < N)
    tl.store(count_ptr, tl.maximum(total, 1), mask=first == 0)


@triton.jit
def _counts(label_N_ptr, rows, N, label_stride, ignore_index):
    label = tl.load(label_N_ptr + rows.to(tl.int64) * label_stride, mask=rows < N, other=0)
    return (rows < N) & (label.to(tl.int64) != ignore_index)


def order_rows(label_N: Tensor, ignore_index: int) -> CountedRows:
    """Return the order of the rows, those with the label `ignore_index` last."""
    N = label_N.shape[0]
    row_N, place_N = torch.empty(2, N, dtype=torch.long, device=label_N.device)
    count = torch.empty(1, dtype=torch.int32, device=label_N.device)
    _order_rows_kernel[(triton.cdiv(N, BLOCK),)](
        label_N, row_N, place_N, count, N, label_N.stride(0), ignore_index,
        BLOCK=BLOCK, WIDTH=WIDTH, num_warps=WARPS,
    )  # fmt: skip
    return CountedRows(row_N, place_N, count)
