"""Hold an order of a call's rows in which ignored ones come last, so that kernels can skip them.

A row counts if its target is not ignored. A row's place is its position in this order. A chunk is a
range of places.

Only the device knows how many rows count. Kernels read that number and end after that many rows. So
ignored rows take little time, and the host does not wait for the device. counted_rows_triton.py
computes the order.

Shapes: N tokens; C tokens of a chunk.
"""

from typing import NamedTuple

from torch import Tensor


class CountedChunk(NamedTuple):
    """Hold the arguments by which kernels find a chunk's rows."""

    row_C: Tensor | None = None  # the row at each place; None if rows keep their order
    number: Tensor | None = None  # how many rows of the call count, [1]; None if all do
    first_place: int = 0

    def of(self, matrix: Tensor, rows: slice) -> Tensor:
        """Return the whole `matrix` [N, ...], of which kernels take the rows row_C.

        If rows keep their order, return only the chunk's rows of `matrix`.
        """
        return matrix[rows] if self.row_C is None else matrix


class CountedRows(NamedTuple):
    """Hold the order of a call's rows."""

    row_N: Tensor
    """The row at each place."""
    place_N: Tensor
    """The place of each row."""
    number: Tensor
    """The number of rows that count, or 1 if none counts; int32 [1]."""

    def chunk(self, rows: slice) -> CountedChunk:
        """Return the chunk of these places."""
        return CountedChunk(self.row_N[rows], self.number, rows.start)


ALL = CountedChunk()
