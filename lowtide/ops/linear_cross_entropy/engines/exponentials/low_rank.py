"""A linear term of few features, a LoRA's, on the path without a pass over the logits: its products with a
chunk's exponentials, that of dX and that of dW, are made at once (low_rank_triton.py).

Shapes: C tokens of a chunk, V classes, R features of the term.
"""

from torch import Tensor

from lowtide.core.matmul import blocks
from lowtide.ops.linear_cross_entropy.engines.exponentials import low_rank_triton
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm


class NarrowTerm(LinearTerm):
    """Both gradients are wanted, and dW is a float32 sum."""

    def _add_product(self, e_CV: Tensor, scaled_CR: Tensor, *, first: bool, last: bool) -> None:
        """What becomes dX's rows is kept: the scaled rows may lie where they will be, and the targets' rows
        are still to come to dW."""
        self.product_CD = self._empty(e_CV.shape[0], self.plan.sum_dtype)
        for rows in blocks(e_CV.shape[0], self.plan.narrow_rows):
            low_rank_triton.products(
                self.product_CD[rows],
                self.sum.sum_VD,
                e_CV[rows],
                scaled_CR[rows],
                self.operand.weight_VD,
                add=not first or rows.start > 0,
            )
