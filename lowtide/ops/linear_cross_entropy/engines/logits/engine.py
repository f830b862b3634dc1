"""Run the engine that stores a chunk's float32 logits and takes their softmax, in torch or Triton.

Shapes: C tokens of a chunk, V classes; B classes of a block.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs, SoftmaxStats, TileColumns
from lowtide.ops.linear_cross_entropy.engines.logits.spec import rows_in_gradient
from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine
from lowtide.ops.linear_cross_entropy.engines.part_stats import begin_merge
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import WeightAccumulator
from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded_classes


class LogitsEngine(LossEngine):
    """Turn the float32 logits of a chunk into their gradient, in place."""

    def accumulator(self, place: int, dw: PendingGradient | None) -> WeightAccumulator | None:
        if place or dw is None or not self._forms_at_once:
            return super().accumulator(place, dw)
        known = float(max(self.M, 1)) if self.plan.options.reduction == "mean" else 1.0
        return self.form_at_once(dw, width=self._width, known=known)

    def chunk_rows(self, gradient: bool) -> int:
        """Return half of the tokens at most where logits would lie in the memory of no gradient.

        Statistics alone have the memory that G takes, in half precision.
        """
        rows = self.plan.rows
        if gradient or not self._forms_at_once:
            return rows
        in_gradient = rows_in_gradient(self.V, self.operands[0].D, self.device.type)
        return rows if rows > in_gradient else min(rows, max(1, self.M // 2))

    def chunk_buffer(self, gradient: bool) -> Tensor:
        if self.single_product is not None:
            return self.single_product.logits[0]
        return self.buffer(self.chunk_rows(gradient), self._width)[:, : self.V]

    @property
    def _width(self) -> int:
        return padded_classes(self.V, self.device.type)

    @property
    def _forms_at_once(self) -> bool:
        return self.plan.engine == "logits_triton" and self.plan.weight_gradient == "single_product"

    @property
    def parts(self) -> list[slice]:
        """Return the parts of this rank's classes whose statistics are kept apart."""
        return self.plan.options.shard.parts_of(self.V)

    def begin_stats(
        self, z_CV: Tensor, coefs: RowCoefs, stats: SoftmaxStats, rows: slice
    ) -> Callable[[], None]:
        """Compute the statistics of this rank's classes, and begin to gather those of all ranks.

        Return a function that merges them into `stats`.
        """
        agreement = self.plan.agreement
        assert agreement is not None

        def take(classes: slice, part: SoftmaxStats) -> None:
            columns = self.columns(rows, classes)
            options: dict[str, Any] = {"take_stats": True, "gradient": False, "keep_logits": True}
            self.tile_gradient_(z_CV[:, classes], coefs, part, columns, **options)

        own = [(part, self.first_class + part.start) for part in self.parts]
        weight_P = self.rows.weight_P if stats.smooth_nll_N is not None else None
        return begin_merge(stats, self._own_targets(z_CV, coefs.target_N), own, take, agreement, weight_P)

    def _own_targets(self, z_CV: Tensor, target_C: Tensor) -> Tensor:
        """Return the logit of each row's target, or 0 if another rank has the target."""
        if self.V == 0:
            return z_CV.new_zeros(z_CV.shape[0])
        place_C = target_C - self.first_class
        inside_C = (place_C >= 0) & (place_C < self.V)
        place_C = place_C.masked_fill(~inside_C, 0)
        logit_C, _ = self.target_logits(z_CV.gather(1, place_C[:, None])[:, 0], place_C)
        return logit_C.masked_fill(~inside_C, 0)

    def tile_gradient_(
        self,
        logits_CB: Tensor,
        coefs: RowCoefs,
        stats: Any,
        columns: TileColumns,
        *,
        take_stats: bool = False,
        gradient: bool = True,
        keep_logits: bool = False,
        bias_sum_B: Tensor | None = None,
    ) -> Any:
        """Run the softmax of the plan's backend on a tile of logits, in place."""
        if self.V == 0:  # other ranks have the classes
            if stats.grad_dot_logit_N is not None:
                stats.grad_dot_logit_N.zero_()
            return torch.empty_like(logits_CB, dtype=self.plan.compute_dtype)
        if self.plan.backend == "triton":
            from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_
        else:
            from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import softmax_gradient_
        return softmax_gradient_(
            logits_CB,
            coefs,
            stats,
            columns,
            take_stats=take_stats,
            gradient_dtype=self.plan.compute_dtype if gradient else None,
            keep_logits=keep_logits,
            bias_sum_B=bias_sum_B,
        )
