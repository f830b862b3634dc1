"""Address some key heads of some batches, and their query heads, as one batch of products.

Shapes: B batches, H query heads, G key heads, R = H / G; M queries, N keys, X features of any kind.
Of a tile: c = batches times key heads, r = R times m rows (the query heads of a key head follow
each other), n columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    """Hold the batches and key heads of one chunk."""

    batches: slice
    groups: slice
    R: int
    dtype: torch.dtype
    """The dtype of the products."""

    @property
    def heads(self) -> slice:
        """Return the chunk's query heads."""
        return slice(self.groups.start * self.R, self.groups.stop * self.R)

    @property
    def c(self) -> int:
        """Return the number of key heads over the chunk's batches."""
        return (self.batches.stop - self.batches.start) * (self.groups.stop - self.groups.start)

    def of_rows(self, tensor_BHMX: Tensor, rows: slice) -> Tensor:
        """Return a view of these rows, [batches, query heads, rows, X]."""
        return tensor_BHMX[self.batches, self.heads, rows]

    def packed(self, tensor_BHMX: Tensor, rows: slice) -> Tensor:  # [c, r, X]
        """Return these rows in the dtype of the products; a key head's query heads are stacked."""
        part = self.of_rows(tensor_BHMX, rows)
        dtype = self.dtype if part.is_floating_point() else part.dtype
        return part.to(dtype).reshape(self.c, self.R * part.shape[2], part.shape[3])

    def unpacked(self, tile_crX: Tensor, rows: slice) -> Tensor:
        """Return the same memory in the shape that of_rows returns."""
        batches, heads = self.batches.stop - self.batches.start, self.heads.stop - self.heads.start
        return tile_crX.view(batches, heads, rows.stop - rows.start, tile_crX.shape[2])

    def keys(self, tensor_BGNX: Tensor, columns: slice) -> Tensor:  # [c, n, X]
        """Return these keys, or their values, in the dtype of the products."""
        part = tensor_BGNX[self.batches, self.groups, columns]
        return part.to(self.dtype).reshape(self.c, part.shape[2], part.shape[3])

    def of_bias(self, bias: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return the part of a bias that falls on a tile, [1 or b, 1 or h, 1 or m, 1 or n]."""
        place = (self.batches, self.heads, rows, columns)
        return bias[tuple(slice(None) if size == 1 else at for size, at in zip(bias.shape, place))]


def allocate(like: Tensor, shape: tuple[int, int, int, int], rows_first: bool) -> Tensor:
    """Return memory for [B, H, M, X], in this order or as [B, M, H, X]."""
    B, H, M, X = shape
    if rows_first:
        return like.new_empty(B, M, H, X).transpose(1, 2)
    return like.new_empty(shape)
