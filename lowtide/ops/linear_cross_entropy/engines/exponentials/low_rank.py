"""Form the gradients of a linear term of few features, such as a LoRA's, without logits.

Its two GEMMs with a chunk's exponentials, for dX and for dW, are formed by one kernel
(low_rank_triton.py).

Shapes: C tokens of a chunk, V classes, R features of the term.
"""

from typing import Any

from torch import Tensor

from lowtide.core.matmul import blocks
from lowtide.ops.linear_cross_entropy.engines.exponentials import low_rank_triton
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm


class LowRankTerm(LinearTerm):
    """Form both gradients of a narrow term; dW is a float32 sum."""

    def _add_product(self, sum: Any, e_CV: Tensor, scaled_CR: Tensor, *, first: bool, last: bool) -> None:
        """Form both products; keep the one for dX until dW is finished.

        The scaled rows may lie in dX's memory, and dW still needs the target rows.
        """
        self.product_CD = self._empty(e_CV.shape[0], self.plan.sum_dtype)
        for rows in blocks(e_CV.shape[0], self.plan.narrow_rows):
            low_rank_triton.products(
                self.product_CD[rows],
                sum.sum_VD,
                e_CV[rows],
                scaled_CR[rows],
                self.operand.weight_VD,
                add=not first or rows.start > 0,
            )
