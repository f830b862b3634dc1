"""Sort the targets of each chunk by class, so that one program can add all rows of a class.

Shapes: N tokens, V classes; lower case = one tile, m the rows that a tile is compared with.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches

# The most rows of a chunk that the kernel sorts; torch sorts longer chunks. The kernel finds the
# place of each row by counting the rows that come before it. It takes one launch, where torch takes
# about ten, but its time grows with the square of the rows. With this many rows it takes an
# estimated 10 microseconds, as long as a sort by torch.
COUNTED_ROWS = 4096
BLOCK, WIDTH = 32, 128


@remember_launches
@triton.jit
def _order_kernel(
    target_N_ptr, ignored_N_ptr, class_N_ptr, order_N_ptr, N, V, chunk,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write each chunk's target classes, sorted, and their rows. Grid: (chunks, chunk / BLOCK)."""
    start = tl.program_id(0) * chunk
    end = tl.minimum(start + chunk, N)
    row_n = start + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    class_n = _class_of(target_N_ptr, ignored_N_ptr, row_n, end, V)
    place_n = tl.full((BLOCK,), 0, tl.int32) + start
    for first in range(start, end, WIDTH):
        row_m = first + tl.arange(0, WIDTH)
        class_m = _class_of(target_N_ptr, ignored_N_ptr, row_m, end, V)
        earlier_nm = (class_m[None, :] == class_n[:, None]) & (row_m[None, :] < row_n[:, None])
        before_nm = (row_m[None, :] < end) & ((class_m[None, :] < class_n[:, None]) | earlier_nm)
        place_n += tl.sum(before_nm.to(tl.int32), 1)
    tl.store(class_N_ptr + place_n, class_n.to(tl.int64), mask=row_n < end)
    tl.store(order_N_ptr + place_n, row_n.to(tl.int64), mask=row_n < end)


@triton.jit
def _class_of(target_N_ptr, ignored_N_ptr, rows, end, V):
    target = tl.load(target_N_ptr + rows, mask=rows < end, other=0).to(tl.int32)
    ignored = tl.load(ignored_N_ptr + rows, mask=rows < end, other=0) != 0
    return tl.where(ignored, V, target)


def sorted_targets(target_N: Tensor, ignored_N: Tensor, V: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return the target classes of each chunk of `rows` rows, sorted, and the row of each.

    Rows of the same class keep their order. Ignored rows have class V, so they come last.
    """
    N = target_N.shape[0]
    rows = max(min(rows, N), 1)
    if rows > COUNTED_ROWS:
        chunk_N = torch.arange(N, device=target_N.device).div_(rows, rounding_mode="floor")
        key_N = chunk_N.mul_(V + 1).add_(target_N.masked_fill(ignored_N, V))
        key_N, order_N = key_N.sort(stable=True)
        return key_N.remainder_(V + 1), order_N
    class_N, order_N = torch.empty_like(target_N), torch.empty_like(target_N)
    grid = cdiv(N, rows), cdiv(rows, BLOCK)
    _order_kernel[grid](target_N, ignored_N, class_N, order_N, N, V, rows, BLOCK=BLOCK, WIDTH=WIDTH)
    return class_N, order_N
