"""Hold the memory of exponentials: a buffer of the workspace, or the weight gradient's own memory.

With class blocks ("class_blocks") the rows of dW of a block of B classes are formed last, and at
once. Until then their memory holds exponentials: in the sweep over tokens those of a chunk, and
from its last chunks on those of the block's classes for the last R tokens, [R, B], which are not
computed again. R is D where both have two bytes a number (decision 0064).

Shapes: V classes; C tokens of a chunk, B classes of a block; R tokens that are stored.
"""

from torch import Tensor

from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded


class ExponentialsMemory:
    """Return where exponentials lie, with rows of whole vectors (decision 0053)."""

    def __init__(self, flat: Tensor, classes: int) -> None:
        """Take memory of one dimension, divided evenly among classes where tokens are stored."""
        self.flat, self.of_a_class = flat, flat.shape[0] // classes

    def chunk(self, tokens: int, classes: int) -> Tensor:  # [C, B]
        """Return memory for a chunk; another chunk overwrites it."""
        return _matrix(self.flat, slice(0, tokens), classes)

    def stored(self, rows: slice, classes: slice) -> Tensor:  # [C, B]
        """Return the memory of these stored tokens, in that of a block's classes."""
        of_block = self.flat[classes.start * self.of_a_class : classes.stop * self.of_a_class]
        return _matrix(of_block, rows, classes.stop - classes.start)


def _matrix(flat: Tensor, rows: slice, columns: int) -> Tensor:
    stride = padded(columns)
    return flat[rows.start * stride : rows.stop * stride].view(-1, stride)[:, :columns]
