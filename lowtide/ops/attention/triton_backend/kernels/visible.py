"""Find the tiles of keys, or of queries, that a program has to read.

A mask is two non-decreasing vectors, first and end: query i sees the keys first[i] <= j < end[i].
Without a mask there are no vectors, and a query sees all keys. A bool bias that is the same for all
queries may hide more keys.

Shapes: M queries, N keys.
"""

import triton
import triton.language as tl

# The elements of a bool bias that shown_range loads at a time.
MASK_BLOCK = tl.constexpr(2048)


@triton.jit
def visible_tiles(low, whole_low, whole_high, high, BLOCK: tl.constexpr):
    """Return which tiles have elements of low <= n < high, and which of them are whole.

    A tile is whole if all its elements lie in whole_low <= n < whole_high; others need a mask.
    Return the first tile; the first whole tile, and the last whole tile + 1; the number of whole
    tiles; and the number of other tiles.
    """
    first, last = low // BLOCK, tl.cdiv(high, BLOCK)
    whole_first = tl.minimum(tl.maximum(tl.cdiv(whole_low, BLOCK), first), last)
    whole_last = tl.maximum(whole_high // BLOCK, whole_first)
    wholes = whole_last - whole_first
    return first, whole_first, whole_last, wholes, last - first - wholes


@triton.jit
def part_of(steps):
    """Return the first of this program's steps, and the one after them (parts_of_queries.py)."""
    part, parts = tl.program_id(2), tl.num_programs(2)
    return steps * part // parts, steps * (part + 1) // parts


@triton.jit
def tile_start(step, first, whole_first, whole_last, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Return the first element of the tile that a step of a loop takes.

    One loop takes the whole tiles. A second loop (MASKED) takes the tiles before and after them, so
    that only this loop applies masks. The second loop has one stage, so it is not pipelined. If
    both loops were pipelined, ptxas would make every matrix product wait for the one before
    (decision 0019).
    """
    tile = whole_first + step
    if MASKED:
        before = whole_first - first
        tile = tl.where(step < before, first + step, whole_last + step - before)
    return tile * BLOCK


@triton.jit
def visible_range(first_ptr, end_ptr, start, BLOCK: tl.constexpr, M, N):
    """Return the columns that some of BLOCK rows from `start` on see, and those that all see.

    No row sees a column outside low <= n < high. All rows see whole_low <= n < whole_high. Rows are
    queries and columns keys, or the reverse.
    """
    if first_ptr is None:
        low, whole_low, whole_high, high = 0, 0, N, N
    else:
        last = tl.minimum(start + BLOCK, M) - 1  # both vectors are non-decreasing
        low, whole_low = tl.load(first_ptr + start), tl.load(first_ptr + last)
        whole_high, high = tl.load(end_ptr + start), tl.load(end_ptr + last)
    return low, whole_low, whole_high, high


@triton.jit
def shown_range(
    ptr, strides, low, whole_low, whole_high, high, N, COLUMN_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    """Return the range of keys, less the keys at both ends that a bool bias hides.

    Only a bool bias that is the same for all queries, such as padding, changes the range. A tile
    that the bias hides in part still counts as whole, since the bias itself masks its scores.
    """
    if COLUMN_BIAS:  # noqa: SIM102  Triton looks at both sides of an "and", and there may be no bias
        if ptr.dtype.element_ty == tl.uint8:
            shown_low, shown_high = high, low
            for start in range(low, high, MASK_BLOCK):
                j = start + tl.arange(0, MASK_BLOCK)
                shown = tl.load(ptr + j.to(tl.int64) * strides[3], mask=j < tl.minimum(high, N), other=0) != 0
                shown_low = tl.minimum(shown_low, tl.min(tl.where(shown, j, high), 0))
                shown_high = tl.maximum(shown_high, tl.max(tl.where(shown, j + 1, low), 0))
            low = shown_low
            high = tl.maximum(shown_high, shown_low)
            whole_high = tl.minimum(whole_high, tl.cdiv(high, BLOCK) * BLOCK)
    return low, whole_low, whole_high, high


@triton.jit
def tiles_if_shown(ptr, strides, j, N, wholes, rest, COLUMN_BIAS: tl.constexpr):
    """Return the numbers of whole and other tiles, or 0 and 0 if a bool bias hides all keys j."""
    if COLUMN_BIAS:  # noqa: SIM102  Triton looks at both sides of an "and", and there may be no bias
        if ptr.dtype.element_ty == tl.uint8:
            shown = tl.load(ptr + j.to(tl.int64) * strides[3], mask=j < N, other=0)
            shows_any = tl.max(shown.to(tl.int32), 0) > 0
            wholes, rest = tl.where(shows_any, wholes, 0), tl.where(shows_any, rest, 0)
    return wholes, rest


@triton.jit
def interval(first_ptr, end_ptr, i, M, N):
    """Return the keys first <= j < end that each query i sees: none for i >= M."""
    if first_ptr is None:
        first, end = tl.zeros_like(i), tl.where(i < M, N, 0)
    else:
        first = tl.load(first_ptr + i, mask=i < M, other=0)
        end = tl.load(end_ptr + i, mask=i < M, other=0)
    return first, end
