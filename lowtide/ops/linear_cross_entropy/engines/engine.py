"""Compute the loss and its gradients by chunks of rows, in bounded memory: the base engine.

For a chunk of C tokens, U = sum_k X_k W_k^T is computed in float32. The softmax turns U in place
into G, the gradient of U apart from the logit scale, rounded once to the operands' dtype. Two GEMMs
per term follow, which accumulate in float32 themselves:

    dX_k = G W_k,   dW_k += G^T X_k

The factor that all rows share (1/n of a mean, the logit scale) is not applied to G, because it
would round every target column with the same error.

softmax_torch.py has the formulas of the softmax.

Shapes: N tokens, of which M are kept (not ignored); D_k features of term k, V classes; C tokens of
a chunk, B classes of a block.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.matmul import Operand, blocks, product, product_of_rows
from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients, allocate, no_gradients
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import Columns, Statistics, Terms
from lowtide.ops.linear_cross_entropy.engines.row_loss import LossRows
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_place import SharedSum
from lowtide.ops.linear_cross_entropy.planning.plan import Plan


class Stream(LossRows):
    """Hold one call's operands and walk over them in chunks.

    It holds views, and vectors of N and V elements, but nothing larger.
    """

    def __init__(self, plan: Plan, head: Head, labels: Labels) -> None:
        super().__init__(plan, head, labels)
        self.operands = [
            Operand(input, weight, plan.compute_dtype, copies, self.counted)
            for input, weight, copies in zip(head.inputs, head.weights, plan.copies_rows)
        ]

    # The walk over chunks of tokens, and the walk over blocks of classes.

    def take_statistics(self) -> Statistics:
        """Compute the row statistics without gradients."""
        statistics = self.empty_statistics()
        self._sweep(self.terms(), statistics, no_gradients(self.head), take_statistics=True)
        return statistics

    def take_statistics_and_gradients(self, factor: Tensor) -> tuple[Statistics, Gradients]:
        """Compute both in one sweep; the gradients are those of factor * sum(loss_N).

        They are stored so that any upstream factor can still be applied.
        """
        statistics = self.empty_statistics()
        gradients = self.gradients(self.terms(), statistics, factor, final=False, take_statistics=True)
        return statistics, gradients

    def gradients(
        self,
        terms: Terms,
        statistics: Statistics,
        factor: Tensor,
        *,
        final: bool,
        take_statistics: bool,
    ) -> Gradients:
        """Compute the gradients that the terms describe, times factor.

        `final`: no upstream factor follows. `take_statistics`: compute the row statistics as well.
        """
        tensors = (*self.head.inputs, *self.head.weights)
        dtypes = {self.plan.compute_dtype, *(tensor.dtype for tensor in tensors)}
        lift = pending_gradient.fp16_scale(terms.largest, dtypes)
        if lift is not None:
            terms, factor = terms * lift, factor / lift
        if self.plan.wanted.scale:
            statistics = dataclasses.replace(statistics, moment_N=torch.empty_like(terms.pull_N))
        gradients = allocate(
            self.plan, self.head, factor, final=final, empty=self.M == 0, some_rows=self.counted is not None
        )
        self._sweep(terms, statistics, gradients, take_statistics=take_statistics)
        if gradients.weights[0] is not None and self.plan.weight_gradient == "by_class" and self.M:
            self._sweep_classes(terms, statistics, gradients)
        if gradients.scale is not None:
            moment_N = statistics.moment_N.masked_fill_(self.ignored_N, 0)
            torch.sum(moment_N, 0, out=gradients.scale.tensor)
        return gradients

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        """Walk over the chunks of tokens: statistics, input gradients, and dW unless "by_class"."""
        plan, operands = self.plan, self.operands
        by_class = plan.weight_gradient == "by_class"
        in_this_sweep = (*gradients.inputs, *gradients.weights[by_class:], gradients.bias, gradients.scale)
        gradient = any(each is not None for each in in_this_sweep)
        if not gradient and not take_statistics:
            return
        logits_CV = self._logits_buffer(plan.rows, gradient)
        dx_sums = [
            None if dx is None or self._writes_directly(dx) else self._buffer(plan.rows, operand.D)
            for dx, operand in zip(gradients.inputs, operands)
        ]
        shared = None
        if (kept := gradients.weights[0]) is not None and plan.weight_gradient == "split":
            shared = self._split_sum(kept)
        for start in range(0, self.M, plan.rows):
            rows = slice(start, min(start + plan.rows, self.M))
            chunks = [operand.rows(rows) for operand in operands]
            z_CV = logits_CV[: rows.stop - rows.start]
            g_CV = self._gradient_of_chunk_(
                z_CV, chunks, rows, terms[rows], statistics[rows], take_statistics, gradient
            )
            for operand, dx, sum_CD in zip(operands, gradients.inputs, dx_sums):
                if dx is not None:
                    self._input_gradient(operand, g_CV, dx, sum_CD, rows)
            for k, (x_CD, dw) in enumerate(zip(chunks, gradients.weights)):
                if k == 0 and shared is not None:
                    shared.add_product(g_CV, x_CD, first=start == 0, last=rows.stop == self.M)
                elif dw is not None and k >= by_class:
                    product(dw.tensor, g_CV.t(), x_CD, add=start > 0)
            if gradients.bias is not None:
                gradients.bias.tensor.add_(g_CV.sum(0, dtype=plan.sum_dtype))
            # Copies may be among them; free them before the next ones are made.
            del chunks, g_CV, x_CD
        if shared is not None and self.M:
            shared.round_in_place()

    def _sweep_classes(self, terms: Terms, statistics: Statistics, gradients: Gradients) -> None:
        """Compute dW[v] = G[:, v]^T X over all tokens, a block of classes at a time, rounded once.

        G is recomputed from the operands and the row statistics.
        """
        plan, dw = self.plan, gradients.weights[0]
        assert dw is not None
        statistics = dataclasses.replace(statistics, moment_N=None)  # already computed
        dw_sum_BD = self._buffer(plan.block_classes, self.operands[0].D)
        logits = self._buffer(plan.block_rows, plan.block_classes).view(-1)
        for classes in blocks(self.V, plan.block_classes):
            B = classes.stop - classes.start
            weights = [operand.weight(classes) for operand in self.operands]
            for start in range(0, self.M, plan.block_rows):
                rows = slice(start, min(start + plan.block_rows, self.M))
                chunks = [operand.rows(rows) for operand in self.operands]
                z_CB = logits[: (rows.stop - rows.start) * B].view(-1, B)
                for k, (x_CD, weight_BD) in enumerate(zip(chunks, weights)):
                    product(z_CB, x_CD, weight_BD.t(), add=k > 0)
                columns = self._columns(rows, classes)
                g_CB = self._softmax_gradient_(z_CB, terms[rows], statistics[rows], columns, False, True)
                product(dw_sum_BD[:B], g_CB.t(), chunks[0], add=start > 0)
                del chunks, x_CD, g_CB
            del weights, weight_BD  # free them before the next ones are made
            pending_gradient.scale_into(
                dw.tensor[classes], dw_sum_BD[:B], dw.applied, plan.backend, spent=True
            )

    # Steps of the walks.

    def _gradient_of_chunk_(
        self,
        z_CV: Tensor,
        chunks: list[Tensor],
        rows: slice,
        terms: Terms,
        statistics: Statistics,
        take_statistics: bool,
        gradient: bool,
    ) -> Any:  # Tensor [C, V], in the memory of z_CV; None without a gradient
        """Compute the chunk's logits, then their row statistics, their gradient, or both."""
        for k, (operand, x_CD) in enumerate(zip(self.operands, chunks)):
            for classes, weight_BD in operand.weights(self.plan.operand_classes):
                product(z_CV[:, classes], x_CD, weight_BD.t(), add=k > 0)
        columns = self._columns(rows)
        return self._softmax_gradient_(z_CV, terms, statistics, columns, take_statistics, gradient)

    def _writes_directly(self, dx: PendingGradient) -> bool:
        """Return True if a GEMM may write the chunk's rows straight into the input gradient."""
        return dx.applied is None and self.counted is None

    def _input_gradient(
        self, operand: Operand, g_CV: Tensor, dx: PendingGradient, sum_CD: Tensor | None, rows: slice
    ) -> None:
        """Compute the chunk's rows of an input gradient from G."""
        dx_CD = dx.tensor[rows] if sum_CD is None else sum_CD[: g_CV.shape[0]]
        for classes, weight_BD in operand.weights(self.plan.operand_classes):
            product_of_rows(dx_CD, g_CV[:, classes], weight_BD, add=classes.start > 0)
        if sum_CD is not None:
            self._keep_rows(dx, dx_CD, rows)

    def _keep_rows(self, dx: PendingGradient, dx_CD: Tensor, rows: slice) -> None:
        """Store a chunk's rows of an input gradient; dx_CD may be overwritten."""
        if self.counted is not None:
            rounded_CD = dx_CD if dx.applied is None else dx_CD.mul_(dx.applied)
            dx.tensor[self.counted[rows]] = rounded_CD.to(dx.tensor.dtype)
        else:
            pending_gradient.scale_into(dx.tensor[rows], dx_CD, dx.applied, self.plan.backend, spent=True)

    def _softmax_gradient_(
        self,
        logits_CB: Tensor,
        terms: Terms,
        statistics: Statistics,
        columns: Columns,
        take_statistics: bool,
        gradient: bool,
    ) -> Any:  # Tensor [C, B]; None without a gradient
        """Run the softmax of the plan's backend on a tile of logits, in place."""
        if self.plan.backend == "triton":
            from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_
        else:
            from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import softmax_gradient_
        return softmax_gradient_(
            logits_CB,
            terms,
            statistics,
            columns,
            take_statistics=take_statistics,
            gradient_dtype=self.plan.compute_dtype if gradient else None,
        )

    def _columns(self, rows: slice, classes: slice = slice(0, None)) -> Columns:
        """Return what the softmax needs to know about a tile's columns."""
        smoothing = self.plan.options.label_smoothing
        return Columns(
            first_class=classes.start,
            bias_B=None if self.bias_V is None else self.bias_V[classes],
            class_weight_B=None if self.class_weight_V is None else self.class_weight_V[classes],
            soft_CB=None if self.soft_NV is None else self.soft_NV[rows, classes],
            smoothing=(1 - smoothing, smoothing / self.V),
            scale=self.scale,
            softcap=self.plan.options.softcap,
        )

    def _split_sum(self, dw: PendingGradient) -> Any:
        """Return the accumulator that lies partly in the gradient's memory."""
        return SharedSum(dw.tensor, dw.applied)

    def _logits_buffer(self, rows: int, gradient: bool) -> Tensor:
        """Return memory for a chunk of logits."""
        return self._buffer(rows, self.V)

    def _buffer(self, rows: int, columns: int) -> Tensor:
        """Return an uninitialised matrix in the accumulators' dtype."""
        return torch.empty(rows, columns, dtype=self.plan.sum_dtype, device=self.device)
