"""Sort the targets of each chunk by class, so that one program can add all rows of a class.

Shapes: N tokens, V classes; lower case = one tile, m the rows that a tile is compared with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches

# The most rows of a chunk that a kernel of our own sorts; torch sorts longer chunks. The kernel
# finds the place of each row by counting the rows that come before it. It takes one launch, where
# torch takes about twenty, but its time grows with the square of the rows: 14 microseconds for
# 4,096 rows, 38 for 8,192, and 125 for 16,384, where torch takes 36, 55 and 70 (decision 0074).
COUNTED_ROWS = 8192
BLOCK, WIDTH = 8, 512
KEYS = 512  # rows per program of the kernel that writes the keys for torch's sort


@remember_launches
@triton.jit
def _order_kernel(
    target_N_ptr, ignored_N_ptr, class_N_ptr, order_N_ptr, N, first_class, V, chunk,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write each chunk's target classes, sorted, and their rows. Grid: (chunks, chunk / BLOCK)."""
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, N)
    row_n = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    class_n = _class_of(target_N_ptr, ignored_N_ptr, row_n, end, first_class, V)
    place_n = tl.full((BLOCK,), 0, tl.int32) + start
    for first in range(start, end, WIDTH):
        row_m = first + tl.arange(0, WIDTH)
        class_m = _class_of(target_N_ptr, ignored_N_ptr, row_m, end, first_class, V)
        earlier_nm = (class_m[None, :] == class_n[:, None]) & (row_m[None, :] < row_n[:, None])
        before_nm = (row_m[None, :] < end) & ((class_m[None, :] < class_n[:, None]) | earlier_nm)
        place_n += tl.sum(before_nm.to(tl.int32), 1)
    tl.store(class_N_ptr + place_n, class_n, mask=row_n < end)
    tl.store(order_N_ptr + place_n, row_n.to(tl.int64), mask=row_n < end)


@remember_launches
@triton.jit
def _key_kernel(
    target_N_ptr, ignored_N_ptr, key_N_ptr, N, first_class, V, chunk, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the number of each row's chunk times V + 1, plus its class. Grid: (N / BLOCK)."""
    row_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    class_n = _class_of(target_N_ptr, ignored_N_ptr, row_n, N, first_class, V)
    chunk_n = (row_n // chunk).to(key_N_ptr.dtype.element_ty)
    tl.store(key_N_ptr + row_n, chunk_n * (V + 1) + class_n, mask=row_n < N)


@triton.jit
def _class_of(target_N_ptr, ignored_N_ptr, rows, end, first_class, V):
    """Return each row's target, counted from first_class; V for a row that has none here."""
    class_n = tl.load(target_N_ptr + rows, mask=rows < end, other=0).to(tl.int32) - first_class
    ignored_n = tl.load(ignored_N_ptr + rows, mask=rows < end, other=0) != 0
    return tl.where(ignored_n | (class_n < 0) | (class_n >= V), V, class_n)


def sorted_targets(
    target_N: Tensor, ignored_N: Tensor, V: int, rows: int, *, first_class: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the target classes of each chunk of `rows` rows, sorted, and the row of each.

    Classes are counted from `first_class`. Rows of the same class keep their order. Ignored rows,
    and those whose target is none of the V classes, have class V, so they come last.
    """
    N = target_N.shape[0]
    rows = max(min(rows, N), 1)
    chunks, operands = cdiv(N, rows), (target_N, ignored_N)
    # A sort of 32-bit keys takes half the passes of one of 64 bits.
    small = chunks * (V + 1) < 2**31
    class_N = torch.empty_like(target_N, dtype=torch.int32 if small else torch.int64)
    sizes = N, first_class, V, rows
    if rows > COUNTED_ROWS:
        _key_kernel[(cdiv(N, KEYS),)](*operands, class_N, *sizes, BLOCK=KEYS)
        class_N, order_N = class_N.sort(stable=True)
        return class_N.remainder_(V + 1) if chunks > 1 else class_N, order_N
    order_N = torch.empty_like(target_N)
    grid = chunks, cdiv(rows, BLOCK)
    _order_kernel[grid](*operands, class_N, order_N, *sizes, BLOCK=BLOCK, WIDTH=WIDTH)
    return class_N, order_N
