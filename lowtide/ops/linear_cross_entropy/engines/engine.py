"""Compute the loss and its gradients by chunks of rows, in bounded memory: what all engines share.

For a chunk of C tokens, U = sum_k X_k W_k^T is computed in float32 and turned into G, the gradient
of U apart from the logit scale, rounded once to the operands' dtype. Two GEMMs per term follow,
which accumulate in float32 themselves:

    dX_k = G W_k,   dW_k += G^T X_k

The factor that all rows share (1/n of a mean, the logit scale) is not applied to G, because it
would round every target column with the same error.

`Engine` has no pass over the logits of its own: an engine adds `chunk_gradient_` and
`tile_gradient_`, or overrides `walk_tokens` and `walk_classes`. row_math.py has the formulas.

Shapes: N tokens, of which M are kept (not ignored); D_k features of term k, V classes; C tokens of
a chunk, B classes of a block.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.matmul import Operand, blocks, product, product_of_rows
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients, InputRows, allocate, no_gradients
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss, as_vector
from lowtide.ops.linear_cross_entropy.engines.row_math import (
    Columns,
    ExcludedTargetStats,
    LogitTransform,
    RowCoefs,
    RowStats,
    SoftmaxStats,
)
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import choose_accumulator

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.planning.plan import Plan


class Engine:
    """Hold one call's operands and walk over them in chunks.

    It holds views, and vectors of N and V elements, but nothing larger.
    """

    stats_kind: type[SoftmaxStats] | type[ExcludedTargetStats] = SoftmaxStats

    def __init__(self, plan: "Plan", head: Head, labels: Labels) -> None:
        self.plan, self.head, self.device = plan, head, head.device
        self.rows = RowLoss(plan, head, labels)
        self.M, self.V = self.rows.M, self.rows.V
        self.class_weight_V = self.rows.class_weight_V
        self.transform = LogitTransform(
            as_vector(head.bias, plan.sum_dtype), as_vector(head.scale, plan.sum_dtype), plan.options.softcap
        )
        self.operands = [
            Operand(input, weight, plan.compute_dtype, copies, self.rows.kept_rows)
            for input, weight, copies in zip(head.inputs, head.weights, plan.copies_rows)
        ]

    def row_statistics(self) -> Any:  # of stats_kind
        """Compute the row statistics without gradients."""
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
        """Compute the gradients that the coefficients describe, from forward's statistics."""
        one = torch.ones((), dtype=self.plan.sum_dtype, device=self.device)
        return self._gradients(coefs, stats, one, final=True, take_stats=False)

    def _gradients(
        self, coefs: RowCoefs, stats: RowStats, factor: Tensor, *, final: bool, take_stats: bool
    ) -> Gradients:
        tensors = (*self.head.inputs, *self.head.weights)
        dtypes = {self.plan.compute_dtype, *(tensor.dtype for tensor in tensors)}
        scale = pending_gradient.fp16_scale(coefs.largest, dtypes)
        if scale is not None:
            coefs, factor = coefs * scale, factor / scale
        if self.plan.needs_grad.scale:
            stats = dataclasses.replace(stats, grad_dot_logit_N=torch.empty_like(coefs.softmax_coef_N))
        some_rows = self.rows.kept_rows is not None
        gradients = allocate(
            self.plan, self.head, factor, final=final, empty=self.M == 0, some_rows=some_rows
        )
        self.walk(coefs, stats, gradients, take_stats=take_stats)
        if gradients.scale is not None:
            grad_dot_logit_N = stats.grad_dot_logit_N.masked_fill_(self.rows.ignored_N, 0)
            torch.sum(grad_dot_logit_N, 0, out=gradients.scale.tensor)
        return gradients

    # The walk over chunks of tokens, and the walk over blocks of classes.

    def walk(self, coefs: RowCoefs, stats: Any, gradients: Gradients, *, take_stats: bool) -> None:
        """Compute the row statistics if asked, and the gradients that are wanted."""
        of_tokens = self.walk_tokens(coefs, stats, gradients, take_stats)
        if gradients.weights[0] is not None and self.plan.weight_gradient == "class_blocks" and self.M:
            self.walk_classes(coefs, stats, gradients, of_tokens)

    def walk_tokens(self, coefs: RowCoefs, stats: Any, gradients: Gradients, take_stats: bool) -> Any:
        """Compute what is not formed class by class, a chunk of tokens at a time.

        Return what the walk over classes needs of it.
        """
        plan = self.plan
        inputs = [self.input_rows(dx) for dx in gradients.inputs]
        sums = [choose_accumulator(plan, k, dw) for k, dw in enumerate(gradients.weights)]
        gradient = any(each is not None for each in (*inputs, *sums, gradients.bias, gradients.scale))
        if not gradient and not take_stats:
            return None
        buffer_CV = self.chunk_buffer(gradient)
        for rows in blocks(self.M, plan.rows):
            chunks = [operand.rows(rows) for operand in self.operands]
            z_CV = buffer_CV[: rows.stop - rows.start]
            g_CV = self.chunk_gradient_(z_CV, chunks, rows, coefs[rows], stats[rows], take_stats, gradient)
            for operand, dx in zip(self.operands, inputs):
                if dx is not None:
                    self._input_gradient(operand, g_CV, dx, rows)
            for x_CD, sum in zip(chunks, sums):
                if sum is not None:
                    sum.add_product(g_CV, x_CD, first=rows.start == 0, last=rows.stop == self.M)
            if gradients.bias is not None:
                gradients.bias.tensor.add_(g_CV.sum(0, dtype=plan.sum_dtype))
            # Copies may be among them; free them before the next ones are made.
            del chunks, g_CV, x_CD
        for sum in sums:
            if sum is not None and self.M:
                sum.finish()
        return None

    def _input_gradient(self, operand: Operand, g_CV: Tensor, dx: InputRows, rows: slice) -> None:
        """Compute the chunk's rows of an input gradient from G."""
        dx_CD = dx.memory(rows)
        for classes, weight_BD in operand.weights(self.plan.operand_classes):
            product_of_rows(dx_CD, g_CV[:, classes], weight_BD, add=classes.start > 0)
        dx.store(rows)

    def walk_classes(self, coefs: RowCoefs, stats: Any, gradients: Gradients, of_tokens: Any) -> None:
        """Compute dW[v] = G[:, v]^T X over all tokens, a block of classes at a time, rounded once.

        G is recomputed from the operands and the row statistics.
        """
        plan, dw = self.plan, gradients.weights[0]
        assert dw is not None
        stats = dataclasses.replace(stats, grad_dot_logit_N=None)  # already computed
        sum_BD = self.buffer(plan.block_classes, self.operands[0].D)
        logits = self.buffer(plan.block_rows, plan.block_classes).view(-1)
        for classes in blocks(self.V, plan.block_classes):
            B = classes.stop - classes.start
            weights = [operand.weight(classes) for operand in self.operands]
            for rows in blocks(self.M, plan.block_rows):
                chunks = [operand.rows(rows) for operand in self.operands]
                z_CB = logits[: (rows.stop - rows.start) * B].view(-1, B)
                for k, (x_CD, weight_BD) in enumerate(zip(chunks, weights)):
                    product(z_CB, x_CD, weight_BD.t(), add=k > 0)
                g_CB = self.tile_gradient_(z_CB, coefs[rows], stats[rows], self.columns(rows, classes))
                product(sum_BD[:B], g_CB.t(), chunks[0], add=rows.start > 0)
                del chunks, x_CD, g_CB
            del weights, weight_BD  # free them before the next ones are made
            pending_gradient.scale_into(dw.tensor[classes], sum_BD[:B], dw.applied, plan.backend, spent=True)

    # What an engine adds.

    def chunk_buffer(self, gradient: bool) -> Tensor:
        """Return memory for the logits of a chunk, or what the engine has in their place."""
        raise NotImplementedError

    def chunk_gradient_(
        self,
        buffer_CV: Tensor,
        chunks: list[Tensor],
        rows: slice,
        coefs: RowCoefs,
        stats: Any,
        take_stats: bool,
        gradient: bool,
    ) -> Any:  # Tensor [C, V], in the buffer's memory; None without a gradient
        """Compute the chunk's logits, then their row statistics, their gradient, or both."""
        raise NotImplementedError

    def tile_gradient_(self, logits_CB: Tensor, coefs: RowCoefs, stats: Any, columns: Columns) -> Any:
        """Turn a block's float32 logits into their gradient, in place; the statistics are known."""
        raise NotImplementedError

    # What engines use.

    def columns(self, rows: slice, classes: slice = slice(0, None)) -> Columns:
        """Return what the softmax needs of a tile's columns."""
        smoothing, soft_NV = self.plan.options.label_smoothing, self.rows.soft_NV
        return Columns(
            first_class=classes.start,
            transform=self.transform.of(classes),
            class_weight_B=None if self.class_weight_V is None else self.class_weight_V[classes],
            soft_CB=None if soft_NV is None else soft_NV[rows, classes],
            smoothing=(1 - smoothing, smoothing / self.V),
        )

    def target_logits(self, u_C: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the targets' logits and slopes; u_C gets the bias added in place."""
        if self.transform.bias_V is not None:
            u_C += self.transform.bias_V[target_C]
        return self.transform.apply(u_C, in_place=False, sloped=True)

    def input_rows(self, dx: pending_gradient.PendingGradient | None) -> InputRows | None:
        """Return what takes the rows of an input gradient, if it is wanted."""
        if dx is None:
            return None
        return InputRows(dx, self.plan.rows, self.plan.sum_dtype, self.plan.backend, self.rows.kept_rows)

    def buffer(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised matrix in the accumulators' dtype."""
        return torch.empty(rows, columns, dtype=self.plan.sum_dtype, device=self.device)
