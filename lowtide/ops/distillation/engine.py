"""Define the engine of distillation: the divergence of both heads, and the student's gradients.

linear_cross_entropy/engines/engine.py has the walk over chunks of rows and blocks of classes. A
chunk or a block has two tiles of float32 logits, the student's and the teacher's. A pass over both
(softmax_torch.py, softmax_triton.py) computes the row statistics, which include the losses. It also
computes the gradient G of the student's logits in float32, rounds it once to the operands' dtype,
and writes it over these logits. Then the walk forms dX = G W and dW = G^T X.

All rows share the factor 1 / (T n) at temperature T, where n is the number of rows that count for a
mean, and else 1. G does not include this factor, which could make its numbers too small for
float16. The factor is applied to dX and dW (lowtide/core/pending_gradient.py).

Shapes: N rows, D features, V classes; C rows of a chunk, B classes of a block.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.core.matmul import Operand, product
from lowtide.core.pending_gradient import (
    FP16_EXPONENT,
    PendingGradient,
    fp16_exponents_of_rows,
    fp16_headroom_of_input,
    fp16_headroom_of_operand,
    fp16_headroom_of_weight,
    fp16_scale,
)
from lowtide.ops.distillation.heads import Heads, copies_input
from lowtide.ops.distillation.part_stats import merge_sums
from lowtide.ops.distillation.planner import ALIGNMENT, DistillationPlan
from lowtide.ops.distillation.softmax_torch import HeadTile, Statistics
from lowtide.ops.linear_cross_entropy.engines.engine import Engine
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LogitTransform
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients, allocate_one
from lowtide.ops.linear_cross_entropy.engines.part_stats import gather_parts
from lowtide.ops.linear_cross_entropy.engines.token_order import TokenOrder
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import WeightAccumulator
from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded

# The gradient of reverse KL with respect to a logit, e^s (s - t - L), may exceed 1. The scale of
# float16 gradients leaves room for a number this large, 2^ROOM.
ROOM = 6


@dataclass(frozen=True, slots=True)
class BothLogits:
    """Hold the logits of both heads for a chunk or a class block; an index applies to both."""

    student_CB: Tensor
    teacher_CB: Tensor

    def __getitem__(self, index: Any) -> "BothLogits":
        return BothLogits(self.student_CB[index], self.teacher_CB[index])

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        return self.student_CB, self.teacher_CB


class DistillationEngine(Engine):
    """Walk over one call's chunks with the logits of student and teacher.

    The gradients are those of the sum of grad_output * loss over the rows. A grad_output of None
    stands for 1 in each row.
    """

    plan: DistillationPlan

    def __init__(self, plan: DistillationPlan, heads: Heads, grad_output: Tensor | None = None) -> None:
        self.heads, self.options, self.final = heads, plan.options, grad_output is not None
        n, options = heads.rows, plan.options
        ignored_N1 = None if heads.ignored is None else heads.ignored.reshape(n, 1)
        operands: list[Operand] = [
            _MaskedOperand(input, weight, dtype, ignored_N1)
            for input, weight, dtype in (
                (heads.student_input, heads.student_weight, options.student_dtype),
                (heads.teacher_input, heads.teacher_weight, options.teacher_dtype),
            )
        ]
        order = None
        if plan.agreement is not None and options.tokens_sharded and options.ranks > 1:
            order = TokenOrder(plan.agreement, heads.device)
        super().__init__(plan, operands, n if order is None else order.N, heads.classes, None)
        self.trained_terms, self.order = 1, order  # only the student's term gets gradients
        self.transforms = [
            LogitTransform(
                None if bias_V is None else bias_V.to(plan.sum_dtype).contiguous(),
                softcap=softcap or 0.0,
                temperature=options.temperature,
            )
            for bias_V, softcap in (
                (heads.student_bias, options.student_softcap),
                (heads.teacher_bias, options.teacher_softcap),
            )
        ]
        if grad_output is None:
            self.coef_N = self.buffer(n).fill_(1)
        else:  # a sum's grad_output is one number, expanded; kernels read contiguous vectors
            self.coef_N = grad_output.to(plan.sum_dtype).reshape(-1).contiguous()
        self.denominator, self.ignored_N = self.buffer().fill_(n), None
        if ignored_N1 is not None:
            self.ignored_N = ignored_N1[:, 0]
            self.coef_N = self.coef_N.masked_fill(self.ignored_N, 0)
            self.denominator.sub_(self.ignored_N.sum())
        if plan.differ is not None:
            self.coef_N = self.coef_N.masked_fill(plan.differ, torch.nan)
        if order is not None:
            none_n = torch.zeros(n, dtype=torch.bool, device=self.device)
            self.ignored_N = order.gather(none_n if self.ignored_N is None else self.ignored_N, True)
            self.coef_N = order.gather(self.coef_N, 0)
            self.denominator = self.buffer().fill_(order.N).sub_(self.ignored_N.sum())
        self.factor = self.buffer().fill_(1).div_(options.temperature)
        # What the host knows of 1 / factor: all of it if no row is ignored.
        self.share = options.temperature * (self.M if options.reduction == "mean" else 1)
        if options.reduction == "mean":
            self.factor.div_(self.denominator.clamp(min=1))

    def run(self) -> tuple[Tensor, Gradients]:
        """Return the loss, and the wanted gradients."""
        gradients = self._gradients()
        leading = self.heads.leading
        loss = self.buffer(*(leading if self.order is None else (self.M,)))
        loss_N = loss.view(self.M)
        self.walk(self.coef_N, Statistics.of(loss_N), gradients, take_stats=True)
        if self.ignored_N is not None:
            loss_N.masked_fill_(self.ignored_N, 0)
        if self.plan.differ is not None:
            loss_N.masked_fill_(self.plan.differ, torch.nan)
        if self.options.reduction == "none":
            if self.order is not None:  # a copy, because autograd lets no caller change a view in place
                loss = self.buffer(*leading).copy_(self.order.own(loss_N).view(leading))
            return loss, gradients
        loss = loss.sum()
        # If no row counts, the mean is NaN, as in torch.
        return loss.div_(self.denominator) if self.options.reduction == "mean" else loss, gradients

    def _gradients(self) -> Gradients:
        """Allocate the wanted gradients, with the factors to be applied to them."""
        x, w, b = self.heads.student
        dtypes = {self.options.student_dtype, *(each.dtype for each in (x, w, b) if each is not None)}
        single, exponent, below = self.plan.weight_gradient == "single_product", FP16_EXPONENT, 0
        if single and w.dtype == torch.float16:
            exponent, below = fp16_exponents_of_rows(self.M, ROOM)
        if self.M > 0:
            largest = functools.partial(torch.linalg.vector_norm, self.coef_N * 2**ROOM, torch.inf)
            scale = fp16_scale(largest, dtypes, exponent)
            if scale is not None:
                self.coef_N, self.factor = self.coef_N * scale, self.factor / scale

        def of(like: Tensor, *shape: int, summed: bool, **given: Any) -> PendingGradient:
            options = {"sum_dtype": self.plan.sum_dtype, "final": self.final, "zero": self.M == 0}
            return allocate_one(like, shape, self.factor, summed=summed, **options | given)

        # G leaves 2^ROOM, and no rank knows the largest number of a divided weight.
        of_input: int | Tensor | None = 0
        of_weight: int | Tensor = 0
        if x.dtype == torch.float16 and self.plan.agreement is None and not self.final:
            one_chunk = 0 < self.M <= self.plan.rows
            of_input = None if one_chunk else fp16_headroom_of_input(w) - ROOM - FP16_EXPONENT + exponent
        if w.dtype == torch.float16:
            ignored = self.heads.ignored
            if single:
                of_weight = fp16_headroom_of_operand(x, below, ignored)
            else:
                of_weight = fp16_headroom_of_weight(x, ignored) - ROOM
        grad_x, grad_w, grad_b = self.plan.needs_grad
        summed = self.plan.weight_gradient == "accumulate"
        return Gradients(
            (of(x, self.heads.rows, x.shape[-1], summed=False, headroom=of_input) if grad_x else None,),
            (of(w, *w.shape, summed=summed, headroom=of_weight, in_operand=single) if grad_w else None,),
            of(b, *b.shape, summed=True, zero=True) if grad_b and b is not None else None,
        )

    # The walk (linear_cross_entropy/engines/engine.py) calls these methods.

    def begin_stats(
        self, logits_CV: BothLogits, coefs: Tensor, stats: Statistics, rows: slice
    ) -> Callable[[], None]:
        """Compute the statistics of this rank's classes, and begin to gather those of all ranks.

        Return a function that waits for them and merges them into `stats`.
        """
        agreement, beta = self.plan.agreement, self.options.beta
        assert agreement is not None
        take = functools.partial(self._pass, logits_CV, coefs, columns=self.columns(rows), part=True)
        sums_kC = stats.loss_N.new_zeros(len(fields(Statistics)) - 1, *stats.loss_N.shape)
        if self.V:
            take(stats=Statistics(torch.empty_like(stats.loss_N), *sums_kC), take_sums=True, take_means=True)
        parts = gather_parts(sums_kC[None], agreement)

        def merge() -> None:
            found_kPC = parts().unbind(1)
            merge_sums(stats, Statistics(found_kPC[0], *found_kPC), beta)
            if not 0 < beta < 1:
                return
            means_kC = sums_kC.new_zeros(2, *stats.loss_N.shape)
            if self.V:
                take(stats=replace(stats, loss_N=means_kC[0], mean_N=means_kC[1]), take_means=True)
            loss_C, mean_C = gather_parts(means_kC[None], agreement)().sum(0)
            stats.loss_N.copy_(loss_C), stats.mean_N.copy_(mean_C)

        return merge

    def accumulator(self, place: int, dw: PendingGradient | None) -> WeightAccumulator | None:
        if dw is None or self.plan.weight_gradient != "single_product":
            return super().accumulator(place, dw)
        return self.form_at_once(dw, known=self.share, width=padded(self.V, ALIGNMENT), heads=2)

    def chunk_buffer(self, gradient: bool) -> BothLogits:
        if self.single_product is not None:
            return BothLogits(*self.single_product.logits)
        return self._logits(self.plan.rows, self.V)

    def block_buffer(self) -> BothLogits:
        return self._logits(self.plan.block_rows, self.plan.block_classes)

    def block_of(self, buffer: BothLogits, rows: int, classes: int) -> BothLogits:
        return buffer[:rows, :classes]

    def _logits(self, rows: int, classes: int) -> BothLogits:
        student_CB, teacher_CB = (self.buffer(rows, padded(classes, ALIGNMENT)) for _ in range(2))
        return BothLogits(student_CB, teacher_CB)[:, :classes]

    def add_term_(self, logits_CB: BothLogits, k: int, x_CD: Tensor, weight_BD: Tensor) -> None:
        product(logits_CB.heads[k], x_CD, weight_BD.t())

    def columns(self, rows: slice, classes: slice = slice(0, None)) -> list[LogitTransform]:
        """Return each head's transform from products to logits, for these classes."""
        return [each.of(classes) for each in self.transforms]

    def tile_gradient_(
        self,
        logits_CB: BothLogits,
        coefs: Tensor,
        stats: Statistics,
        columns: list[LogitTransform],
        *,
        take_stats: bool = False,
        gradient: bool = True,
        bias_sum_B: Tensor | None = None,
    ) -> Any:
        if self.V == 0:  # this rank has no classes
            return torch.empty_like(logits_CB.student_CB, dtype=self.operands[0].dtype)
        options = {"take_sums": take_stats, "take_means": take_stats, "gradient": gradient}
        return self._pass(logits_CB, coefs, stats, columns, **options, bias_sum_B=bias_sum_B)

    def _pass(
        self,
        logits_CB: BothLogits,
        coefs: Tensor,
        stats: Statistics,
        columns: list[LogitTransform],
        *,
        take_sums: bool = False,
        take_means: bool = False,
        gradient: bool = False,
        part: bool = False,
        bias_sum_B: Tensor | None = None,
    ) -> Any:
        """Run the pass of the plan's backend over a tile of both heads' logits."""
        if self.plan.backend == "triton":
            from lowtide.ops.distillation.softmax_triton import divergence_
        else:
            from lowtide.ops.distillation.softmax_torch import divergence_
        student, teacher = map(HeadTile, logits_CB.heads, columns)
        return divergence_(
            student,
            teacher,
            stats,
            coefs,
            self.options.beta,
            take_sums=take_sums,
            take_means=take_means,
            gradient_dtype=self.operands[0].dtype if gradient else None,
            pass_logits=self.plan.pass_logits,
            part=part,
            bias_sum_B=bias_sum_B,
        )


class _MaskedOperand(Operand):
    """Read the input rows of one head, with zeros in place of ignored rows.

    An ignored row may hold NaN, and a coefficient of 0 times NaN is NaN.
    """

    def __init__(
        self, input: Tensor, weight_VD: Tensor, dtype: torch.dtype, ignored_N1: Tensor | None
    ) -> None:
        super().__init__(input, weight_VD, dtype, copies_input(input, dtype), None)
        self.ignored_N1 = ignored_N1

    def rows(self, rows: slice) -> Tensor:
        x_CD = super().rows(rows)
        return x_CD if self.ignored_N1 is None else x_CD.masked_fill(self.ignored_N1[rows], 0)
