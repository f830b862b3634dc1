"""Run the engine that stores a chunk's float32 logits and takes their softmax, in torch or Triton.

Shapes: C tokens of a chunk, V classes; B classes of a block.
"""

from typing import Any

from torch import Tensor

from lowtide.core.matmul import product
from lowtide.ops.linear_cross_entropy.engines.engine import Engine
from lowtide.ops.linear_cross_entropy.engines.row_math import Columns, RowCoefs
from lowtide.ops.linear_cross_entropy.planning.operands import padded_classes


class LogitsEngine(Engine):
    """Turn the float32 logits of a chunk into their gradient, in place."""

    def chunk_buffer(self, gradient: bool) -> Tensor:
        return self.buffer(self.plan.rows, padded_classes(self.V, self.device.type))[:, : self.V]

    def chunk_gradient_(
        self,
        buffer_CV: Tensor,
        chunks: list[Tensor],
        rows: slice,
        coefs: RowCoefs,
        stats: Any,
        take_stats: bool,
        gradient: bool,
    ) -> Any:
        for k, (operand, x_CD) in enumerate(zip(self.operands, chunks)):
            for classes, weight_BD in operand.weights(self.plan.operand_classes):
                product(buffer_CV[:, classes], x_CD, weight_BD.t(), add=k > 0)
        return self.tile_gradient_(
            buffer_CV, coefs, stats, self.columns(rows), take_stats=take_stats, gradient=gradient
        )

    def tile_gradient_(
        self,
        logits_CB: Tensor,
        coefs: RowCoefs,
        stats: Any,
        columns: Columns,
        *,
        take_stats: bool = False,
        gradient: bool = True,
    ) -> Any:
        """Run the softmax of the plan's backend on a tile of logits, in place."""
        if self.plan.backend == "triton":
            from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_
        else:
            from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import softmax_gradient_
        dtype = self.plan.compute_dtype if gradient else None
        return softmax_gradient_(
            logits_CB, coefs, stats, columns, take_stats=take_stats, gradient_dtype=dtype
        )
