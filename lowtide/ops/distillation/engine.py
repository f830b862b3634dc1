"""Compute losses and the student's gradients from products of chunks, in bounded memory.

For a chunk of C rows, two products give the logits of student and teacher in float32, side by side.
A pass over both computes the losses. It writes the gradient G of the student's logits, formed in
float32 and rounded once to the operands' dtype, over those logits (softmax_torch.py,
softmax_triton.py). Then dX_c = G W, and dW += G^T X_c, where the product itself adds to a float32
sum. Where that sum does not fit, dW is formed class block by class block over all rows, from logits
that are computed again, and rounded once.

The factor that all rows share, 1 / (temperature n), stays out of G. There it would round all small
numbers alike.

Shapes: N rows, D features, V classes; C rows of a chunk, B classes of a block.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.matmul import Operand, blocks, product
from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.distillation.chunking import make_plan, operand_dtype, padded
from lowtide.ops.distillation.heads import Heads, Options, Side
from lowtide.ops.distillation.softmax_torch import Logits, Statistics
from lowtide.ops.linear_cross_entropy.engines.gradients import InputRows

# Room for a reverse KL's p (s - t - L), which may exceed 1, in a float16 gradient.
ROOM = 64


class Engine:
    """Hold one call's operands and plan, and walk over its chunks.

    Gradients are those of the sum of upstream * loss; None stands for 1 in each row.
    """

    def __init__(
        self, heads: Heads, options: Options, wanted: Sequence[bool], upstream: Tensor | None = None
    ) -> None:
        self.heads, self.options, self.wanted = heads, options, wanted
        self.N, self.V, self.final = heads.rows, heads.classes, upstream is not None
        self.plan = make_plan(heads, options, wanted)
        self.ignored_N1 = None if heads.ignored is None else heads.ignored.reshape(self.N, 1)
        self.student = _Head(heads.student, options.student_dtype, options.student_softcap, self)
        self.teacher = _Head(heads.teacher, options.teacher_dtype, options.teacher_softcap, self)
        if upstream is None:
            self.pull_N = self.new(self.N).fill_(1)
        else:  # a sum's is one number, expanded, and kernels would read beyond it
            self.pull_N = upstream.to(self.sum_dtype).reshape(-1).contiguous()
        self.counted = self.new().fill_(self.N)
        if self.ignored_N1 is not None:
            self.pull_N = self.pull_N.masked_fill(self.ignored_N1[:, 0], 0)
            self.counted.sub_(self.ignored_N1.sum())
        self.factor = self.new().fill_(1).div_(options.temperature)
        if options.reduction == "mean":
            self.factor.div_(self.counted.clamp(min=1))

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype of logits, losses and sums."""
        return self.options.sum_dtype

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialised memory on the call's device."""
        return torch.empty(shape, dtype=dtype or self.sum_dtype, device=self.heads.device)

    def run(self) -> tuple[Tensor, list[PendingGradient]]:
        """Return the loss, and the gradients asked for."""
        kept = self._gradients()
        loss = self.new(*self.heads.leading)
        vectors = [self.new(self.N) for _ in Statistics._fields[1:]]
        statistics = Statistics(loss.view(self.N), *vectors)
        dx, dw, db = kept
        self._sweep(statistics, dx, dw if self.plan.accumulate else None, db)
        # Without rows it is zero already.
        if dw is not None and not self.plan.accumulate and self.N:
            self._sweep_classes(statistics, dw)
        return self._reduced(loss), [each for each in kept if each is not None]

    def _reduced(self, loss: Tensor) -> Tensor:
        """Return the losses, reduced as the options say."""
        if self.heads.ignored is not None:
            loss.masked_fill_(self.heads.ignored, 0)
        if self.options.reduction != "none":
            loss = loss.sum()
        # If no row counts, NaN as in torch.
        return loss.div_(self.counted) if self.options.reduction == "mean" else loss

    def _gradients(self) -> list[PendingGradient | None]:
        """Return memory for the gradients asked for, with the factors still to be applied."""
        dtypes = {
            self.options.student_dtype,
            *(each.dtype for each in self.heads.student if each is not None),
        }
        if self.N > 0:
            lift = pending_gradient.fp16_scale(lambda: self.pull_N.abs().amax() * ROOM, dtypes)
            if lift is not None:
                self.pull_N, self.factor = self.pull_N * lift, self.factor / lift

        def keep(like: Tensor, *shape: int, summed: bool, zero: bool = self.N == 0) -> PendingGradient:
            summed = summed or like.dtype == self.sum_dtype
            tensor = self.new(*shape, dtype=self.sum_dtype if summed else like.dtype)
            if zero:
                tensor.zero_()
            if summed:
                return PendingGradient(tensor, None, self.factor)
            # The factor contains the scale of the logits' gradient; no further scale is needed.
            if self.final:
                return PendingGradient(tensor, self.factor, None)
            return PendingGradient(tensor, *pending_gradient.split_factor(self.factor, like.dtype, 0))

        x, w, b = self.heads.student
        return [
            keep(x, self.N, x.shape[-1], summed=False) if self.wanted[0] else None,
            keep(w, *w.shape, summed=self.plan.accumulate) if self.wanted[1] else None,
            keep(b, *b.shape, summed=True, zero=True) if self.wanted[2] and b is not None else None,
        ]

    def _sweep(
        self,
        statistics: Statistics,
        dx: PendingGradient | None,
        dw: PendingGradient | None,
        db: PendingGradient | None,
    ) -> None:
        """Walk over the chunks: losses, and the gradients that are given."""
        plan = self.plan
        s_CV, t_CV = (self.new(plan.rows, padded(self.V))[:, : self.V] for _ in range(2))
        inputs = None if dx is None else InputRows(dx, plan.rows, self.sum_dtype, plan.backend, None)
        for start in range(0, self.N, plan.rows):
            rows = slice(start, min(start + plan.rows, self.N))
            C = rows.stop - start
            x_CD = self.student.masked(rows)
            for classes in blocks(self.V, plan.operand_classes):
                self.student.product(s_CV[:C, classes], x_CD, classes)
            teacher_x_CD = self.teacher.masked(rows)
            for classes in blocks(self.V, plan.operand_classes):
                self.teacher.product(t_CV[:C, classes], teacher_x_CD, classes)
            del teacher_x_CD  # some are copies: freed before the next are made
            g_CV = self._divergence_(
                s_CV[:C], t_CV[:C], statistics, rows, gradient=any((dx, dw, db)), take_statistics=True
            )
            if inputs is not None:
                self._input_gradient(g_CV, inputs, rows)
            if dw is not None:
                product(dw.tensor, g_CV.t(), x_CD, add=start > 0)
            if db is not None:
                db.tensor.add_(g_CV.sum(0, dtype=self.sum_dtype))
            del x_CD, g_CV

    def _sweep_classes(self, statistics: Statistics, dw: PendingGradient) -> None:
        """Form dW[v] = G[:, v]^T X over all rows, a class block at a time, rounded once.

        G is computed again.
        """
        plan, size = self.plan, self.plan.block_classes
        sum_BD = self.new(size, self.student.D)
        s_CB, t_CB = (self.new(plan.block_rows, padded(size)) for _ in range(2))
        for classes in blocks(self.V, size):
            B = classes.stop - classes.start
            student_BD, teacher_BD = self.student.weight(classes), self.teacher.weight(classes)
            for start in range(0, self.N, plan.block_rows):
                rows = slice(start, min(start + plan.block_rows, self.N))
                s_cb, t_cb = (each[: rows.stop - start, :B] for each in (s_CB, t_CB))
                product(t_cb, self.teacher.masked(rows), teacher_BD.t())
                x_CD = self.student.masked(rows)
                product(s_cb, x_CD, student_BD.t())
                g_CB = self._divergence_(
                    s_cb, t_cb, statistics, rows, classes, gradient=True, take_statistics=False
                )
                product(sum_BD[:B], g_CB.t(), x_CD, add=start > 0)
                del x_CD, g_CB
            del student_BD, teacher_BD  # freed before the next are made
            pending_gradient.scale_into(dw.tensor[classes], sum_BD[:B], dw.applied, plan.backend)

    def _input_gradient(self, g_CV: Tensor, dx: InputRows, rows: slice) -> None:
        """Write a chunk's dX = G W."""
        for classes in blocks(self.V, self.plan.operand_classes):
            product(dx.memory(rows), g_CV[:, classes], self.student.weight(classes), add=classes.start > 0)
        dx.store(rows)

    def _divergence_(
        self,
        s_CB: Tensor,
        t_CB: Tensor,
        statistics: Statistics,
        rows: slice,
        classes: slice = slice(None),
        *,
        gradient: bool,
        take_statistics: bool,
    ) -> Tensor:
        """Run the pass over a tile of logits, in place."""
        return self._pass().divergence_(
            self.student.logits(s_CB, classes),
            self.teacher.logits(t_CB, classes),
            statistics.of(rows),
            self.pull_N[rows],
            self.options.beta,
            take_statistics=take_statistics,
            gradient_dtype=self.student.dtype if gradient else None,
            at_once=self.plan.at_once,
        )

    def _pass(self) -> ModuleType:
        """Return the module that has the pass."""
        if self.plan.backend == "triton":
            from lowtide.ops.distillation import softmax_triton

            return softmax_triton
        from lowtide.ops.distillation import softmax_torch as rows

        return rows


class _Head(Operand):
    """Hold the operands of student or teacher, and what turns a product into logits."""

    def __init__(self, side: Side, dtype: torch.dtype, softcap: float | None, engine: Engine) -> None:
        input, weight_VD, bias_V = side
        super().__init__(input, weight_VD, operand_dtype(dtype, input.device.type), True, None)
        self.bias_V = None if bias_V is None else bias_V.to(engine.sum_dtype).contiguous()
        self.temperature, self.softcap = engine.options.temperature, softcap
        self.ignored_N1 = engine.ignored_N1

    def masked(self, rows: slice) -> Tensor:
        """Return some rows, with 0 in place of ignored ones.

        Ignored rows may be NaN, which no factor takes to 0.
        """
        x_CD = self.rows(rows)
        return x_CD if self.ignored_N1 is None else x_CD.masked_fill(self.ignored_N1[rows], 0)

    def product(self, out_CB: Tensor, x_CD: Tensor, classes: slice) -> None:
        """Write the product of some rows and the weight of some classes."""
        product(out_CB, x_CD, self.weight(classes).t())

    def logits(self, product_CB: Tensor, classes: slice) -> Logits:
        """Return the logits of a product: the product, and what is still to be applied to it."""
        bias_B = None if self.bias_V is None else self.bias_V[classes]
        return Logits(product_CB, bias_B, self.temperature, self.softcap)
