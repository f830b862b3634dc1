"""Define the base class of the loss's engines: row statistics and gradients of a call.

row_math.py has the formulas, engine.py has the walk over chunks, row_loss.py has the loss of each
row.

Shapes: N tokens, of which M are kept (not ignored); D_k features of term k, V classes; C tokens of
a chunk, B classes of a block.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.matmul import Operand
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels
from lowtide.ops.linear_cross_entropy.engines.engine import Engine
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    ExcludedTargetStats,
    LogitTransform,
    RowCoefs,
    RowStats,
    SoftmaxStats,
    TileColumns,
    excluded_logsumexp,
)
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gradients import (
    Gradients,
    allocate,
    fp16_exponents,
    no_gradients,
)
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss, as_vector

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.planning.plan import Plan


class LossEngine(Engine):
    """Hold one call's head and labels, and compute its row statistics and gradients."""

    plan: "Plan"
    stats_kind: type[SoftmaxStats] | type[ExcludedTargetStats] = SoftmaxStats

    def __init__(self, plan: "Plan", head: Head, labels: Labels) -> None:
        self.head, self.rows = head, make_rows(plan, head, labels)
        kept_rows, self.class_weight_V = self.rows.kept_rows, self.rows.class_weight_V
        self.transform = LogitTransform(
            as_vector(head.bias, plan.sum_dtype), as_vector(head.scale, plan.sum_dtype), plan.options.softcap
        )
        operands = [
            Operand(input, weight, plan.compute_dtype, copies, kept_rows)
            for input, weight, copies in zip(head.inputs, head.weights, plan.access.copies_rows)
        ]
        super().__init__(plan, operands, self.rows.M, head.classes, kept_rows)
        self.order, self.cleared_N = self.rows.order, self.rows.cleared_N
        self.first_class = plan.options.first_class

    def row_statistics(self) -> Any:  # an instance of stats_kind
        """Compute the row statistics, and no gradients."""
        stats = self.rows.empty_stats(self.stats_kind)
        self.walk(self.rows.coefs(), stats, no_gradients(self.head), take_stats=True)
        return stats

    def forward(self, factor: Tensor) -> tuple[Any, Gradients]:
        """Compute the row statistics and the gradients of factor * sum(loss_N) in one walk.

        The gradients are stored so that any upstream factor can still be applied.
        """
        stats = self.rows.empty_stats(self.stats_kind)
        return stats, self._gradients(self.rows.coefs(), stats, factor, final=False, take_stats=True)

    def backward(self, coefs: RowCoefs, stats: RowStats) -> Gradients:
        """Compute the gradients with these coefficients, from the statistics of forward."""
        return self._gradients(coefs, stats, self.rows.one(), final=True, take_stats=False)

    def _gradients(
        self, coefs: RowCoefs, stats: RowStats, factor: Tensor, *, final: bool, take_stats: bool
    ) -> Gradients:
        tensors = (*self.head.inputs, *self.head.weights)
        dtypes = {self.plan.compute_dtype, *(tensor.dtype for tensor in tensors)}
        scale = pending_gradient.fp16_scale(coefs.largest, dtypes, fp16_exponents(self.plan, self.head)[0])
        if scale is not None:
            coefs, factor = coefs * scale, factor / scale
        if self.plan.needs_grad.scale:
            stats = dataclasses.replace(stats, grad_dot_logit_N=torch.empty_like(coefs.softmax_coef_N))
        gradients = allocate(
            self.plan,
            self.head,
            factor,
            self.rows.ignored_N,
            final=final,
            empty=self.M == 0,
            some_rows=self.kept_rows is not None and not self.plan.skips_ignored,
        )
        self.walk(coefs, stats, gradients, take_stats=take_stats)
        if gradients.scale is not None:
            grad_dot_logit_N = stats.grad_dot_logit_N.masked_fill_(self.rows.ignored_N, 0)
            torch.sum(grad_dot_logit_N, 0, out=gradients.scale.tensor)
            if self.plan.agreement is not None:
                self.plan.agreement.group.sum_(gradients.scale.tensor)()
        return gradients

    def walk_classes(self, coefs: RowCoefs, stats: Any, gradients: Gradients, of_tokens: Any) -> None:
        known = dataclasses.replace(stats, grad_dot_logit_N=None)  # computed in the walk over tokens
        super().walk_classes(coefs, known, gradients, of_tokens)

    # Engines call these.

    def counted_chunk(self, rows: slice) -> CountedChunk:
        """Return where the chunk's rows lie, and how many of them count."""
        order = self.rows.counted_rows
        return ALL if order is None else order.chunk(rows)

    def columns(self, rows: slice, classes: slice = slice(0, None)) -> TileColumns:
        """Return what the softmax needs of a tile's columns."""
        smoothing, soft_NV = self.plan.options.label_smoothing, self.rows.soft_NV
        return TileColumns(
            first_class=self.first_class + (classes.start or 0),
            transform=self.transform.of(classes),
            class_weight_B=None if self.class_weight_V is None else self.class_weight_V[classes],
            soft_CB=None if soft_NV is None else soft_NV[rows, classes],
            smoothing=(1 - smoothing, smoothing / self.rows.V),
        )

    def target_logits(self, u_C: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets' logits and slopes from their products u_C.

        The bias is added to u_C in place.
        """
        if self.transform.bias_V is not None:
            u_C += self.transform.bias_V[target_C]
        return self.transform.apply(u_C, in_place=False, sloped=True)

    def take_smooth_nll(self, stat: ExcludedTargetStats, logit_C: Tensor, raw_smooth_C: Tensor) -> None:
        """Write sum_v w_v (lse - z_v) of each row, from sum_v w_v u_v and the target's logit."""
        scale = self.transform.scale
        smooth_logit_C = raw_smooth_C if scale is None else raw_smooth_C * scale
        lse_C = excluded_logsumexp(stat, logit_C)
        torch.sub(lse_C * self.rows.total_weight(), smooth_logit_C, out=stat.smooth_nll_N)


def make_rows(plan: "Plan", head: Head, labels: Labels) -> RowLoss:
    """Return the RowLoss of a call; import the class that needs Triton only if it is taken."""
    kind, call_kind = RowLoss, plan.call_kind
    # Only RowLoss can ask other ranks: for labels, if tokens are sharded, and for class weights.
    asks = plan.agreement is not None and (plan.options.tokens_sharded or call_kind.class_weights)
    if plan.backend == "triton" and not asks and not call_kind.probabilities:
        from lowtide.ops.linear_cross_entropy.engines.row_loss_triton import TritonRowLoss as kind
    return kind(plan, head, labels)
