"""Divide the scores into tiles, and address a tile's parts of the operands.

A tile has some batches and key heads (a chunk), some queries (rows) and some keys (columns).

Shapes: B batches, H query heads, G key heads, R = H / G; M queries, N keys, X features of any kind.
A tile has m queries of each query head and n columns. It has c key heads, counted over the chunk's
batches, and r = R m rows for each: the rows of the R query heads that share the key head follow
each other.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.matmul import blocks
from lowtide.ops.attention.definition.operands import AttentionSizes

# The most scores of a tile. Computing so many takes much longer than torch takes to call an
# operation, and they stay in the processor's cache between operations.
TILE = 1 << 20
# A tile of several heads has at most 1 / PART of all scores, so that it is small beside them.
PART = 64  # decision 0082
# The rows and columns of a tile, if there are at least as many queries (of all R heads) and keys.
# Products of this size run at full speed. If sides were longer, a causal mask would hide more of a
# tile.
SIDE = 512


class TileShape(NamedTuple):
    """Hold the size of a tile."""

    heads: int
    """The number of key heads, counted over all batches."""
    rows: int
    """The number of queries of each query head."""
    columns: int
    """The number of keys."""


class KeySpan(NamedTuple):
    """Hold the keys that are the columns of a tile."""

    span: slice
    begins: bool
    """True if the mask hides some of these keys from a row since they are before its first key."""
    ends: bool
    """True if the mask hides some of these keys from a row since they are after its last key."""


class Chunk(NamedTuple):
    """Hold the batches and key heads of one chunk."""

    batches: slice
    groups: slice
    R: int
    dtype: torch.dtype
    """The dtype of the products."""

    @property
    def heads(self) -> slice:
        return slice(self.groups.start * self.R, self.groups.stop * self.R)

    @property
    def c(self) -> int:
        """Return the number of key heads over the chunk's batches."""
        return (self.batches.stop - self.batches.start) * (self.groups.stop - self.groups.start)

    def of_rows(self, tensor_BHMX: Tensor, rows: slice) -> Tensor:
        """Return a view of these rows, [batches, query heads, rows, X]."""
        return tensor_BHMX[self.batches, self.heads, rows]

    def packed(self, tensor_BHMX: Tensor, rows: slice) -> Tensor:  # [c, r, X]
        """Return these rows in the products' dtype, with the query heads of a key head stacked."""
        part = self.of_rows(tensor_BHMX, rows)
        dtype = self.dtype if part.is_floating_point() else part.dtype
        return part.to(dtype).reshape(self.c, self.R * part.shape[2], part.shape[3])

    def unpacked(self, tile_crX: Tensor, rows: slice) -> Tensor:
        """Return a view of a tile in the shape that `of_rows` returns."""
        batches, heads = self.batches.stop - self.batches.start, self.heads.stop - self.heads.start
        return tile_crX.view(batches, heads, rows.stop - rows.start, tile_crX.shape[2])

    def keys(self, tensor_BGNX: Tensor, columns: slice) -> Tensor:  # [c, n, X]
        """Return the rows of key or value in these columns, in the dtype of the products."""
        part = tensor_BGNX[self.batches, self.groups, columns]
        return part.to(self.dtype).reshape(self.c, part.shape[2], part.shape[3])

    def of_bias(self, bias: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return the part of a bias that falls on a tile, [1 or b, 1 or h, 1 or m, 1 or n]."""
        place = (self.batches, self.heads, rows, columns)
        return bias[tuple(slice(None) if size == 1 else at for size, at in zip(bias.shape, place))]


def tile_shape(size: AttentionSizes) -> TileShape:
    """Return the size of a tile for this call.

    A tile is square if there are many queries and many keys. If there are few queries, it has more
    keys; if there are few keys, more queries. It has as many heads as then fit. A part of an
    operand that belongs to it has at most TILE numbers.
    """
    one, longest = min(TILE, SIDE * SIDE), TILE // max(1, size.K, size.E)
    columns = max(1, min(size.N, SIDE))
    rows = max(1, min(size.M * size.R, one // columns, longest))
    columns = max(1, min(size.N, one // rows, longest))
    most = max(one, min(TILE, size.B * size.H * size.M * size.N // PART))
    heads = min(most // (rows * columns), longest // max(rows, columns))
    return TileShape(max(1, heads), max(1, rows // size.R), columns)


def head_chunks(size: AttentionSizes, heads: int, dtype: torch.dtype) -> Iterator[Chunk]:
    """Yield the chunks: whole batches, or some heads of one batch.

    `heads` is the most key heads of a chunk, counted over its batches. `dtype` is that of the
    products.
    """
    for batches in blocks(size.B, max(1, heads // max(1, size.G))):
        for groups in blocks(size.G, heads):
            yield Chunk(batches, groups, size.R, dtype)
