"""Some key heads of some batches, and the query heads that read them, as one batch of products.

Shapes: B batches, H query heads, G key heads, R = H / G; M queries, N keys, X features of whatever it is; of
a tile c = batches times key heads, r = R times m rows (the query heads of a key head follow each other), n
columns.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Chunk(NamedTuple):
    batches: slice
    groups: slice
    R: int
    dtype: torch.dtype
    """In which the products are computed."""

    @property
    def heads(self) -> slice:
        return slice(self.groups.start * self.R, self.groups.stop * self.R)

    @property
    def c(self) -> int:
        return (self.batches.stop - self.batches.start) * (self.groups.stop - self.groups.start)

    def of_rows(self, tensor_BHMX: Tensor, rows: slice) -> Tensor:
        return tensor_BHMX[self.batches, self.heads, rows]

    def packed(self, tensor_BHMX: Tensor, rows: slice) -> Tensor:  # [c, r, X]
        part = self.of_rows(tensor_BHMX, rows)
        dtype = self.dtype if part.is_floating_point() else part.dtype
        return part.to(dtype).reshape(self.c, self.R * part.shape[2], part.shape[3])

    def unpacked(self, tile_crX: Tensor, rows: slice) -> Tensor:
        """The same memory, as of_rows gives it."""
        batches, heads = self.batches.stop - self.batches.start, self.heads.stop - self.heads.start
        return tile_crX.view(batches, heads, rows.stop - rows.start, tile_crX.shape[2])

    def keys(self, tensor_BGNX: Tensor, columns: slice) -> Tensor:  # [c, n, X]
        part = tensor_BGNX[self.batches, self.groups, columns]
        return part.to(self.dtype).reshape(self.c, part.shape[2], part.shape[3])

    def of_bias(self, bias: Tensor, rows: slice, columns: slice) -> Tensor:
        """[1 or b, 1 or h, 1 or m, 1 or n]: the part that falls on a tile."""
        place = (self.batches, self.heads, rows, columns)
        return bias[tuple(slice(None) if size == 1 else at for size, at in zip(bias.shape, place))]


def allocate(like: Tensor, shape: tuple[int, int, int, int], rows_first: bool) -> Tensor:
    """[B, H, M, X], which lies in memory in this order or as [B, M, H, X]."""
    B, H, M, X = shape
    if rows_first:
        return like.new_empty(B, M, H, X).transpose(1, 2)
    return like.new_empty(shape)
