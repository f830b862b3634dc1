"""Run the engine that stores a chunk's float32 logits and takes their softmax, in torch or Triton.

Shapes: C tokens of a chunk, V classes; B classes of a block.
"""

from typing import Any

from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine
from lowtide.ops.linear_cross_entropy.engines.row_math import RowCoefs, TileColumns
from lowtide.ops.linear_cross_entropy.planning.operands import padded_classes


class LogitsEngine(LossEngine):
    """Turn the float32 logits of a chunk into their gradient, in place."""

    def chunk_buffer(self, gradient: bool) -> Tensor:
        return self.buffer(self.plan.rows, padded_classes(self.V, self.device.type))[:, : self.V]

    def tile_gradient_(
        self,
        logits_CB: Tensor,
        coefs: RowCoefs,
        stats: Any,
        columns: TileColumns,
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
