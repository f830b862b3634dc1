"""The chunk engine: the loss and its gradients from products of chunks, in bounded memory.

For a chunk of C tokens, U = sum_k X_k W_k^T in float32; one pass turns U in place into G, the gradient of U
but for the logit scale, rounded once to the operands' dtype; then dX_k = G W_k and dW_k += G^T X_k, the sum
kept in float32 by the product itself. The factor that all rows share (1/n of a mean, the logit scale) stays
out of G: folded in, it would round every target column with the same error.

Shapes: N tokens, of which M count; D_k features of term k, V classes; C tokens of a chunk, B classes of a
block.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import scaling
from lowtide.linear_cross_entropy.check import check_classes
from lowtide.linear_cross_entropy.gradients import Gradients, Kept, allocate, no_gradients
from lowtide.linear_cross_entropy.head import Head
from lowtide.linear_cross_entropy.operands import Operand, blocks, product
from lowtide.linear_cross_entropy.plan import Plan
from lowtide.linear_cross_entropy.rows import Columns, Statistics, Terms
from lowtide.linear_cross_entropy.shared_sum import SharedSum


class Stream:
    """One call's operands, to be walked in chunks. Holds views and vectors of N and V elements, nothing
    larger. Rows are those that count, on the CPU; on CUDA, where counting them would mean waiting, all."""

    def __init__(self, plan: Plan, head: Head, target: Tensor, class_weight_V: Tensor | None) -> None:
        self.plan, self.device, self.head = plan, head.device, head
        self.N, self.V = head.tokens, head.classes
        self.bias_V = _vector(head.bias, plan.sum_dtype)
        self.scale = _vector(head.scale, plan.sum_dtype)
        self.class_weight_V = _vector(class_weight_V, plan.sum_dtype)
        self._set_target(target)
        self.operands = [
            Operand(input, weight, plan.compute_dtype, copies, self.counted)
            for input, weight, copies in zip(head.inputs, head.weights, plan.copies_rows)
        ]

    def _set_target(self, target: Tensor) -> None:
        self.soft_NV, self.counted = None, None
        if self.plan.job.probabilities:
            self.soft_NV = target.reshape(self.N, self.V)
            self.M = self.N
            self.ignored_N = torch.zeros(self.N, dtype=torch.bool, device=self.device)
            self.foreign_N = self.ignored_N
            self.target_N = torch.zeros(self.N, dtype=torch.long, device=self.device)
            return
        ignore_index = self.plan.options.ignore_index
        target_N = target.flatten().long()  # a narrower one would wrap ignore_index
        check_classes(target_N, self.V, ignore_index)
        ignored_N = target_N == ignore_index
        if self.device.type == "cpu" and self.plan.backend == "torch" and bool(ignored_N.any()):
            self.counted = (~ignored_N).nonzero()[:, 0]
            target_N, ignored_N = target_N[self.counted], ignored_N[self.counted]
        self.M = target_N.shape[0]
        self.ignored_N = ignored_N
        self.foreign_N = ((target_N < 0) | (target_N >= self.V)) & ~ignored_N
        self.target_N = target_N.masked_fill(ignored_N | self.foreign_N, 0)

    # From vectors of all rows to those that count, and back.

    def of_counted(self, vector_N: Tensor) -> Tensor:  # [M]
        return vector_N if self.counted is None else vector_N[self.counted]

    def of_all(self, vector_M: Tensor, ignored: float = 0) -> Tensor:  # [N]
        if self.counted is None:
            return vector_M.masked_fill(self.ignored_N, ignored)
        return vector_M.new_full((self.N,), ignored).index_copy_(0, self.counted, vector_M)

    # The loss of each row, and what its gradient is made of (the formulas are in rows.py).

    def loss_N(self, statistics: Statistics) -> Tensor:
        options = self.plan.options
        if statistics.cross_N is not None:
            loss_N = statistics.cross_N.clone()
        else:
            loss_N = self._hit_weight_N() * statistics.gap_N
        if statistics.smooth_N is not None:
            loss_N.add_(statistics.smooth_N, alpha=options.label_smoothing / self.V)
        if options.z_loss:
            loss_N.addcmul_(*[self.logsumexp_N(statistics)] * 2, value=options.z_loss)
        return loss_N

    def logsumexp_N(self, statistics: Statistics) -> Tensor:
        return statistics.sum_N.log() + statistics.max_N

    def entropy_N(self, statistics: Statistics) -> Tensor:
        return statistics.sum_N.log() - statistics.mean_N

    def denominator(self) -> Tensor:
        """Of the mean: the class weights of the targets that count, added up."""
        if self.soft_NV is not None:
            return torch.full((), float(self.N), dtype=self.plan.sum_dtype, device=self.device)
        return self.target_weight_N.sum()

    def terms(self, upstream_N: Tensor | None = None) -> Terms:
        """Of the gradient of sum(upstream_N * loss_N); all upstream gradients are 1 where none are given."""
        options = self.plan.options
        smoothing = options.label_smoothing
        one_N = torch.ones_like(self.ignored_N, dtype=self.plan.sum_dtype)
        if upstream_N is not None:
            one_N = self.of_counted(upstream_N).to(one_N.dtype)
        one_N = one_N.masked_fill(self.ignored_N, 0)
        soft_N = spread_N = None
        if self.soft_NV is not None:
            soft_N = one_N
            pull_N = hit_N = torch.zeros_like(one_N)
        else:
            pull_N = hit_N = self._hit_weight_N() * one_N
            if smoothing:
                spread_N = one_N * (smoothing / self.V)
                pull_N = pull_N + spread_N * self.total_weight()
        lse_pull_N = one_N * (2 * options.z_loss) if options.z_loss else None
        return Terms(self.target_N, self.ignored_N, pull_N, hit_N, spread_N, soft_N, lse_pull_N)

    def log_prob_terms(
        self,
        statistics: Statistics,
        grad_log_prob_N: Tensor | None,
        grad_entropy_N: Tensor | None,
        grad_logsumexp_N: Tensor | None,
    ) -> Terms:
        """Of the gradient of these three, each times its upstream gradient; all vectors of all rows."""
        hit_N = torch.zeros(self.M, dtype=self.plan.sum_dtype, device=self.device)
        tilt_N = None
        if grad_log_prob_N is not None:
            hit_N = self._counting(grad_log_prob_N).neg().masked_fill_(self.foreign_N, torch.nan)
        pull_N = hit_N
        if grad_logsumexp_N is not None:
            pull_N = pull_N + self._counting(grad_logsumexp_N)
        if grad_entropy_N is not None:
            tilt_N = self._counting(grad_entropy_N).neg()
            pull_N = pull_N - tilt_N * statistics.mean_N
        return Terms(self.target_N, self.ignored_N, pull_N, hit_N, tilt_N=tilt_N)

    def total_weight(self) -> Tensor | int:
        return self.V if self.class_weight_V is None else self.class_weight_V.sum()

    def _counting(self, vector_N: Tensor) -> Tensor:
        return self.of_counted(vector_N).to(self.plan.sum_dtype).masked_fill(self.ignored_N, 0)

    def _hit_weight_N(self) -> Tensor:
        smoothing = self.plan.options.label_smoothing
        return self.target_weight_N * (1 - smoothing) if smoothing else self.target_weight_N

    @functools.cached_property
    def target_weight_N(self) -> Tensor:
        """The class weight of each row's target; 0 for ignored rows, NaN where a CUDA target is no class."""
        if self.class_weight_V is None:
            weight_N = torch.ones(self.M, dtype=self.plan.sum_dtype, device=self.device)
        else:
            weight_N = self.class_weight_V[self.target_N]
        return weight_N.masked_fill_(self.foreign_N, torch.nan).masked_fill_(self.ignored_N, 0)

    # The walk over the tokens, and the one over the classes.

    def take_statistics(self) -> Statistics:
        statistics = self.empty_statistics()
        self._sweep(self.terms(), statistics, no_gradients(self.head), take_statistics=True)
        return statistics

    def take_statistics_and_gradients(self, factor: Tensor) -> tuple[Statistics, Gradients]:
        """In one sweep; the gradients of factor * sum(loss_N), ready for any upstream factor."""
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
        """Of what the terms say, times factor."""
        tensors = (*self.head.inputs, *self.head.weights)
        dtypes = {self.plan.compute_dtype, *(tensor.dtype for tensor in tensors)}
        lift = scaling.lift(terms.largest, dtypes)
        if lift is not None:
            terms, factor = terms * lift, factor / lift
        if self.plan.wanted.scale:
            statistics = dataclasses.replace(statistics, moment_N=torch.empty_like(terms.pull_N))
        gradients = allocate(
            self.plan, self.head, factor, final=final, empty=self.M == 0, some_rows=self.counted is not None
        )
        self._sweep(terms, statistics, gradients, take_statistics=take_statistics)
        if gradients.weights[0] is not None and self.plan.weight_gradient == "by_class" and self.M:
            self._sweep_classes(terms, statistics, gradients.weights[0])
        if gradients.scale is not None:
            moment_N = statistics.moment_N.masked_fill_(self.ignored_N, 0)
            torch.sum(moment_N, 0, out=gradients.scale.tensor)
        return gradients

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        plan, operands = self.plan, self.operands
        by_class = plan.weight_gradient == "by_class"
        in_this_sweep = (*gradients.inputs, *gradients.weights[by_class:], gradients.bias, gradients.scale)
        gradient = any(each is not None for each in in_this_sweep)
        if not gradient and not take_statistics:
            return
        logits_CV = self._buffer(plan.rows, self.V)
        dx_sums = [
            None if dx is None or self._writes_directly(dx) else self._buffer(plan.rows, operand.D)
            for dx, operand in zip(gradients.inputs, operands)
        ]
        shared = None
        if (kept := gradients.weights[0]) is not None and plan.weight_gradient == "split":
            shared = SharedSum(kept.tensor, kept.rounding)
        for start in range(0, self.M, plan.rows):
            rows = slice(start, min(start + plan.rows, self.M))
            C = rows.stop - rows.start
            chunks = [operand.rows(rows) for operand in operands]
            z_CV = logits_CV[:C]
            self._logits(z_CV, chunks)
            g_CV = self._softmax_gradient_(z_CV, rows, terms, statistics, take_statistics, gradient)
            for operand, dx, sum_CD in zip(operands, gradients.inputs, dx_sums):
                if dx is not None:
                    self._input_gradient(operand, g_CV, dx, sum_CD, rows)
            for k, (x_CD, dw) in enumerate(zip(chunks, gradients.weights)):
                if k == 0 and shared is not None:
                    shared.add_product(g_CV, x_CD, first=start == 0)
                elif dw is not None and k >= by_class:
                    product(dw.tensor, g_CV.t(), x_CD, add=start > 0)
            if gradients.bias is not None:
                gradients.bias.tensor.add_(g_CV.sum(0, dtype=plan.sum_dtype))
            del chunks, g_CV, x_CD  # copies, some of them: gone before the next are made
        if shared is not None and self.M:
            shared.round_in_place()

    def _sweep_classes(self, terms: Terms, statistics: Statistics, dw: Kept) -> None:
        """dW[v] = G[:, v]^T X over all tokens, a block of classes at a time, rounded once; G anew."""
        plan = self.plan
        statistics = dataclasses.replace(statistics, moment_N=None)  # taken already
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
                g_CB = self._softmax_gradient_(z_CB, rows, terms, statistics, False, True, classes)
                product(dw_sum_BD[:B], g_CB.t(), chunks[0], add=start > 0)
                del chunks, x_CD, g_CB
            del weights, weight_BD  # before the next ones are made
            scaling.scale_into(dw.tensor[classes], dw_sum_BD[:B], dw.rounding, plan.backend, spent=True)

    # Pieces.

    def _logits(self, z_CV: Tensor, chunks: list[Tensor]) -> None:
        for k, (operand, x_CD) in enumerate(zip(self.operands, chunks)):
            for classes, weight_BD in operand.weights(self.plan.operand_classes):
                product(z_CV[:, classes], x_CD, weight_BD.t(), add=k > 0)

    def _writes_directly(self, dx: Kept) -> bool:
        """Whether a product may leave the chunk's gradient where it is kept."""
        return dx.rounding is None and self.counted is None

    def _input_gradient(
        self, operand: Operand, g_CV: Tensor, dx: Kept, sum_CD: Tensor | None, rows: slice
    ) -> None:
        dx_CD = dx.tensor[rows] if sum_CD is None else sum_CD[: g_CV.shape[0]]
        for classes, weight_BD in operand.weights(self.plan.operand_classes):
            product(dx_CD, g_CV[:, classes], weight_BD, add=classes.start > 0)
        if sum_CD is None:
            return
        if self.counted is not None:
            rounded_CD = dx_CD if dx.rounding is None else dx_CD.mul_(dx.rounding)
            dx.tensor[self.counted[rows]] = rounded_CD.to(dx.tensor.dtype)
        else:
            scaling.scale_into(dx.tensor[rows], dx_CD, dx.rounding, self.plan.backend, spent=True)

    def _softmax_gradient_(
        self,
        logits_CB: Tensor,
        rows: slice,
        terms: Terms,
        statistics: Statistics,
        take_statistics: bool,
        gradient: bool,
        classes: slice = slice(0, None),
    ) -> Any:  # Tensor [C, B], or None without a gradient
        if self.plan.backend == "triton":
            from lowtide.linear_cross_entropy.kernels import softmax_gradient_
        else:
            from lowtide.linear_cross_entropy.rows import softmax_gradient_
        smoothing = self.plan.options.label_smoothing
        columns = Columns(
            first_class=classes.start,
            bias_B=None if self.bias_V is None else self.bias_V[classes],
            class_weight_B=None if self.class_weight_V is None else self.class_weight_V[classes],
            soft_CB=None if self.soft_NV is None else self.soft_NV[rows, classes],
            smoothing=(1 - smoothing, smoothing / self.V),
            scale=self.scale,
            softcap=self.plan.options.softcap,
        )
        return softmax_gradient_(
            logits_CB,
            terms[rows],
            statistics[rows],
            columns,
            take_statistics=take_statistics,
            gradient_dtype=self.plan.compute_dtype if gradient else None,
        )

    def empty_statistics(self) -> Statistics:
        job, smoothing = self.plan.job, self.plan.options.label_smoothing

        def vector(given: bool = True, dtype: torch.dtype = self.plan.sum_dtype) -> Tensor | None:
            return torch.empty(self.M, dtype=dtype, device=self.device) if given else None

        return Statistics(
            max_N=vector(),
            sum_N=vector(),
            gap_N=vector(not job.probabilities),
            smooth_N=vector(smoothing > 0 and not job.probabilities),
            mass_N=vector(job.probabilities),
            cross_N=vector(job.probabilities),
            mean_N=vector(job.log_probs),
            argmax_N=vector(job.log_probs, torch.long),
        )

    def _buffer(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.plan.sum_dtype, device=self.device)


def _vector(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if vector is None else vector.to(dtype).contiguous()
