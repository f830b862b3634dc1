"""Cut the scores into tiles, and find the tiles that a mask leaves.

A tile has a few heads, rows of queries and columns of keys.

Shapes: M queries, N keys; R query heads to a key head.
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from lowtide.ops.attention.definition.operands import Sizes

# Scores in a tile. It stays in a core's own cache from one pass to the next, and is large enough
# that calling a torch operation costs little beside it.
TILE = 1 << 18
# Its sides, where there are as many queries (over all R heads) and keys. Products run at full speed
# there.
SIDE = 512


class Shape(NamedTuple):
    """Hold the size of a tile."""

    heads: int
    """Key heads, over all batches."""
    rows: int
    """Queries of each head."""
    columns: int


class Columns(NamedTuple):
    """Hold some columns of a tile of rows."""

    span: slice
    whole: bool
    """True if every row sees every column."""


def tile_shape(size: Sizes) -> Shape:
    """Return a tile's size for this call.

    It is square where both sides are long, longer where the other side is short, and has several
    heads where both are short.
    """
    columns = max(1, min(size.N, SIDE))
    rows = max(1, min(size.M * size.R, TILE // columns))
    columns = max(1, min(size.N, TILE // rows))
    return Shape(max(1, TILE // (rows * columns)), max(1, rows // size.R), columns)


def head_chunks(B: int, G: int, heads: int) -> Iterator[tuple[slice, slice]]:
    """Yield batches and key heads: several whole batches, or some heads of one."""
    if heads >= G > 0:
        step = heads // G
        for batch in range(0, B, step):
            yield slice(batch, min(batch + step, B)), slice(0, G)
        return
    for batch in range(B):
        for head in range(0, G, heads):
            yield slice(batch, batch + 1), slice(head, min(head + heads, G))


def spans(total: int, step: int) -> Iterator[slice]:
    """Yield slices of `step` elements that cover `total`."""
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


class Seen:
    """Hold which columns each tile of rows sees."""

    def __init__(self, first: Tensor | None, end: Tensor | None, size: Sizes, shape: Shape) -> None:
        self.N, self.step = size.N, shape.columns
        self.masked = first is not None
        if first is None or end is None:
            return
        # Both vectors are non-decreasing, so their ends are their extremes.
        firsts, ends = first.tolist(), end.tolist()
        self.of_rows = {
            rows.start: (firsts[rows.start], firsts[rows.stop - 1], ends[rows.start], ends[rows.stop - 1])
            for rows in spans(size.M, shape.rows)
        }

    def columns(self, rows: slice) -> Iterator[Columns]:
        """Yield the tiles of columns that some row of a tile sees."""
        low, whole_low, whole_high, high = 0, 0, self.N, self.N
        if self.masked:
            low, whole_low, whole_high, high = self.of_rows[rows.start]
        for span in spans(max(high - low, 0), self.step):
            span = slice(low + span.start, low + span.stop)
            yield Columns(span, whole_low <= span.start and span.stop <= whole_high)
