"""Hold an order of a call's rows in which ignored ones come last, made on the device.

How many rows count is known on the device alone. Kernels read it there and end early, so that
ignored rows take no time and nobody waits for the device. counted_rows_triton.py makes the order.

Shapes: N tokens; C tokens of a chunk.
"""

from typing import NamedTuple

from torch import Tensor


class CountedChunk(NamedTuple):
    """Hold what kernels take to find the rows of a chunk; all rows count without a count."""

    row_C: Tensor | None = None
    number: Tensor | None = None  # [1]
    first_place: int = 0

    def of(self, matrix: Tensor, rows: slice) -> Tensor:
        """Return what a kernel takes with the chunk's rows of a matrix [N, ...]: the whole of it.

        If all rows count, kernels take the rows themselves.
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
