"""Hold an order of a call's rows in which ignored ones come last, made on the device.

Only the device knows how many rows count. Kernels read this number there and end after so many
rows. So ignored rows take no time, and the host does not wait for the device.
counted_rows_triton.py makes the order.

Shapes: N tokens; C tokens of a chunk.
"""

from typing import NamedTuple

from torch import Tensor


class CountedChunk(NamedTuple):
    """Hold the arguments by which kernels find a chunk's rows; without a number, all rows count."""

    row_C: Tensor | None = None
    number: Tensor | None = None  # [1]
    first_place: int = 0

    def of(self, matrix: Tensor, rows: slice) -> Tensor:
        """Return the matrix [N, ...], in which kernels find the chunk's rows by their order.

        If all rows count, return the chunk's rows alone.
        """
        return matrix[rows] if self.row_C is None else matrix


class CountedRows(NamedTuple):
    """Hold the order of a call's rows."""

    row_N: Tensor
    """The row at each place."""
    place_N: Tensor
    """The place of each row."""
    number: Tensor
    """The number of rows that count, or 1 if none does, int32 [1]."""

    def chunk(self, rows: slice) -> CountedChunk:
        """Return the chunk of these places."""
        return CountedChunk(self.row_N[rows], self.number, rows.start)


ALL = CountedChunk()
