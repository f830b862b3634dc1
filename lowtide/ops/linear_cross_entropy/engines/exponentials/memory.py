"""Hold the memory of exponentials: a buffer of the workspace, or the weight gradient's own memory.

With class blocks ("class_blocks"), dW is formed in a second sweep over the tokens, one block of B
classes at a time. In the first sweep dW's memory is free, and holds the exponentials of a chunk.
The exponentials of the last R tokens stay there for the second sweep: the memory of a block's rows
of dW holds [R, B] of them, for the block's classes. The second sweep computes the exponentials of
all other tokens again. R is at most D if exponentials and dW both have two bytes per number
(decision 0064).

Shapes: D features, V classes; C tokens of a chunk, B classes of a block; R tokens that are stored.
"""

from torch import Tensor

from lowtide.ops.linear_cross_entropy.planning.byte_counts import exponentials_stride


class ExponentialsMemory:
    """Divide memory into matrices of exponentials, whose rows are padded (exponentials_stride)."""

    def __init__(self, flat: Tensor, classes: int) -> None:
        """Take memory of one dimension; where tokens are stored, each class has an equal part."""
        self.flat, self.of_a_class = flat, flat.shape[0] // classes

    def chunk(self, tokens: int, classes: int) -> Tensor:  # [C, B]
        """Return memory for a chunk's exponentials; the next chunk overwrites them."""
        return _matrix(self.flat, slice(0, tokens), classes)

    def stored(self, rows: slice, classes: slice) -> Tensor:  # [C, B]
        """Return the memory of stored tokens for a block's classes; `rows` counts stored tokens."""
        of_block = self.flat[classes.start * self.of_a_class : classes.stop * self.of_a_class]
        return _matrix(of_block, rows, classes.stop - classes.start)


def _matrix(flat: Tensor, rows: slice, columns: int) -> Tensor:
    stride = exponentials_stride(columns)
    return flat[rows.start * stride : rows.stop * stride].view(-1, stride)[:, :columns]
