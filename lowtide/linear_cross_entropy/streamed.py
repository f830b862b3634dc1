"""The chunk engine: the loss and its gradients from products of chunks, in bounded memory.

For a chunk of C tokens, Z = X_c W^T in float32; one pass turns Z in place into G = dloss/dZ, rounded once
to the operands' dtype; then dX_c = G W and dW += G^T X_c, the sum kept in float32 by the product itself. The
factor that all rows share (1/n of a mean) stays out of G: folded in, it would round every target column with
the same error.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import scaling
from lowtide.linear_cross_entropy.plan import Plan
from lowtide.linear_cross_entropy.rows import Statistics, Terms


@dataclass(frozen=True, slots=True)
class Kept:
    """A gradient on its way: the sum of the products itself, or that sum rounded; see scaling.py."""

    tensor: Tensor
    dtype: torch.dtype
    """Of the gradient; the tensor's own may be wider."""
    rounding: Tensor | None
    """The factor that goes in as a float32 sum is rounded into tensor; None where tensor is the sum."""
    pending: Tensor | None
    """The factor still to be applied; None where there is none."""


@dataclass(frozen=True, slots=True)
class Gradients:
    input: Kept | None  # [N, D]
    weight: Kept | None  # [V, D]
    bias: Kept | None  # [V]


NO_GRADIENTS = Gradients(None, None, None)


class Stream:
    """One call's operands, to be walked in chunks. Holds views and vectors of N and V elements, nothing
    larger."""

    def __init__(
        self,
        plan: Plan,
        input: Tensor,  # [..., D]
        linear_weight: Tensor,  # [V, D]
        linear_bias: Tensor | None,  # [V]
        target: Tensor,  # [...]
        class_weight: Tensor | None,  # [V]
    ) -> None:
        self.plan, self.device = plan, input.device
        self.input, self.leading = _flat_view(input), input.shape[:-1]
        self.linear_weight, self.linear_bias = linear_weight, linear_bias
        # On CUDA a weight of another dtype is cast as a whole and once, which is what autocast does with it.
        cast = linear_weight.is_cuda and linear_weight.dtype != plan.compute_dtype
        self.weight_VD = linear_weight.to(plan.compute_dtype) if cast else linear_weight
        self.bias_V = _vector(linear_bias, plan.sum_dtype)
        self.class_weight_V = _vector(class_weight, plan.sum_dtype)
        self.N, self.D, self.V = target.numel(), input.shape[-1], linear_weight.shape[0]

        target_N = target.flatten()
        self.ignored_N = target_N == plan.ignore_index
        self.foreign_N = ((target_N < 0) | (target_N >= self.V)) & ~self.ignored_N
        if not input.is_cuda and bool(self.foreign_N.any()):
            raise IndexError(
                f"target must hold classes from 0 to {self.V - 1} or ignore_index ({plan.ignore_index}), "
                f"got {target_N[self.foreign_N][0].item()}"
            )
        self.target_N = target_N.masked_fill(self.ignored_N | self.foreign_N, 0).long().contiguous()

    # The loss of each row, and what its gradient is made of (the formulas are in rows.py).

    def loss_N(self, statistics: Statistics) -> Tensor:
        smoothing = self.plan.label_smoothing
        loss_N = self._target_weight_N().mul_(1 - smoothing).mul_(statistics.gap_N)
        if statistics.smooth_N is not None:
            loss_N.add_(statistics.smooth_N, alpha=smoothing / self.V)
        return loss_N.masked_fill_(self.ignored_N, 0)

    def denominator(self) -> Tensor:
        """Of the mean: the class weights of the targets that count, added up."""
        return self._target_weight_N().sum()

    def terms(self, upstream_N: Tensor | None = None) -> Terms:
        smoothing = self.plan.label_smoothing
        hit_N = self._target_weight_N().mul_(1 - smoothing)
        spread_N = torch.full_like(hit_N, smoothing / self.V).masked_fill_(self.ignored_N, 0)
        if upstream_N is not None:
            hit_N.mul_(upstream_N), spread_N.mul_(upstream_N)
        if not smoothing:
            return Terms(self.target_N, hit_N, hit_N, None)
        total_weight = self.V if self.class_weight_V is None else self.class_weight_V.sum()
        return Terms(self.target_N, spread_N * total_weight + hit_N, hit_N, spread_N)

    def _target_weight_N(self) -> Tensor:
        """The class weight of each row's target; 0 for ignored rows, NaN where a CUDA target is no class."""
        if self.class_weight_V is None:
            weight_N = torch.ones(self.N, dtype=self.plan.sum_dtype, device=self.device)
        else:
            weight_N = self.class_weight_V[self.target_N]
        return weight_N.masked_fill_(self.foreign_N, torch.nan).masked_fill_(self.ignored_N, 0)

    # The walk over the tokens, and the one over the classes.

    def take_statistics(self) -> Statistics:
        statistics = self._empty_statistics()
        self._sweep(self.terms(), statistics, NO_GRADIENTS, take_statistics=True)
        return statistics

    def take_statistics_and_gradients(self, factor: Tensor) -> tuple[Statistics, Gradients]:
        """In one sweep; the gradients of factor * sum(loss_N), ready for any upstream factor."""
        statistics, terms = self._empty_statistics(), self.terms()
        return statistics, self._gradients(terms, statistics, factor, final=False, take_statistics=True)

    def gradients(self, statistics: Statistics, upstream_N: Tensor) -> Gradients:
        """The gradients of sum(upstream_N * loss_N)."""
        factor = torch.ones((), dtype=self.plan.sum_dtype, device=self.device)
        terms = self.terms(upstream_N.to(self.plan.sum_dtype))
        return self._gradients(terms, statistics, factor, final=True, take_statistics=False)

    def _gradients(
        self, terms: Terms, statistics: Statistics, factor: Tensor, *, final: bool, take_statistics: bool
    ) -> Gradients:
        dtypes = (self.plan.compute_dtype, self.input.dtype, self.linear_weight.dtype)
        lift = scaling.lift(terms.pull_N, dtypes)
        if lift is not None:
            terms, factor = terms * lift, factor / lift
        gradients = self._allocate(factor, final=final)
        self._sweep(terms, statistics, gradients, take_statistics=take_statistics)
        if gradients.weight is not None and self.plan.weight_gradient == "by_class" and self.N:
            self._sweep_classes(terms, statistics, gradients.weight)
        return gradients

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        plan = self.plan
        dx, dw, db = gradients.input, gradients.weight, gradients.bias
        logits_CV = self._buffer(plan.rows, self.V)
        accumulate = dw is not None and plan.weight_gradient == "accumulate"
        wanted = dx is not None or db is not None or accumulate
        dx_sum_CD = None if dx is None or dx.rounding is None else self._buffer(plan.rows, self.D)
        for start in range(0, self.N, plan.rows):
            rows = slice(start, min(start + plan.rows, self.N))
            x_CD = self._rows(rows)
            z_CV = logits_CV[: x_CD.shape[0]]
            for classes in self._blocks(plan.operand_classes):
                product(z_CV[:, classes], x_CD, self._weight_block(classes).t())
            g_CV = self._softmax_gradient_(z_CV, terms[rows], statistics[rows], take_statistics, wanted)
            if dx is not None:
                dx_CD = dx.tensor[rows] if dx_sum_CD is None else dx_sum_CD[: x_CD.shape[0]]
                for classes in self._blocks(plan.operand_classes):
                    product(dx_CD, g_CV[:, classes], self._weight_block(classes), add=classes.start > 0)
                if dx.rounding is not None:
                    scaling.scale_into(dx.tensor[rows], dx_CD, dx.rounding, plan.backend)
            if dw is not None and plan.weight_gradient == "accumulate":
                product(dw.tensor, g_CV.t(), x_CD, add=start > 0)
            if db is not None:
                db.tensor.add_(g_CV.sum(0, dtype=plan.sum_dtype))
            del x_CD, g_CV  # copies, some of them: gone before the next are made

    def _sweep_classes(self, terms: Terms, statistics: Statistics, dw: Kept) -> None:
        """dW[v] = G[:, v]^T X over all tokens, a block of classes at a time, rounded once; G anew."""
        plan = self.plan
        dw_sum_BD = self._buffer(plan.block_classes, self.D)
        logits = self._buffer(plan.block_rows, plan.block_classes).view(-1)
        for classes in self._blocks(plan.block_classes):
            weight_BD, B = self._weight_block(classes), classes.stop - classes.start
            for start in range(0, self.N, plan.block_rows):
                rows = slice(start, min(start + plan.block_rows, self.N))
                x_CD = self._rows(rows)
                z_CB = logits[: x_CD.shape[0] * B].view(-1, B)
                product(z_CB, x_CD, weight_BD.t())
                g_CB = self._softmax_gradient_(z_CB, terms[rows], statistics[rows], False, True, classes)
                product(dw_sum_BD[:B], g_CB.t(), x_CD, add=start > 0)
                del x_CD, g_CB
            del weight_BD  # before the next one is made
            scaling.scale_into(dw.tensor[classes], dw_sum_BD[:B], dw.rounding, plan.backend)

    # Pieces.

    def _softmax_gradient_(
        self,
        logits_CB: Tensor,
        terms: Terms,
        statistics: Statistics,
        take_statistics: bool,
        gradient: bool,
        classes: slice = slice(0, None),
    ) -> Tensor:
        if self.plan.backend == "triton":
            from lowtide.linear_cross_entropy.kernels import softmax_gradient_
        else:
            from lowtide.linear_cross_entropy.rows import softmax_gradient_
        return softmax_gradient_(
            logits_CB,
            terms,
            statistics,
            take_statistics=take_statistics,
            gradient_dtype=self.plan.compute_dtype if gradient else None,
            bias_B=None if self.bias_V is None else self.bias_V[classes],
            class_weight_B=None if self.class_weight_V is None else self.class_weight_V[classes],
            first_class=classes.start,
        )

    def _allocate(self, factor: Tensor, *, final: bool) -> Gradients:
        plan = self.plan

        def keep(shape: tuple[int, ...], like: Tensor, *, summed: bool) -> Kept:
            summed = summed or like.dtype == plan.sum_dtype
            tensor = torch.empty(shape, dtype=plan.sum_dtype if summed else like.dtype, device=self.device)
            if self.N == 0 or len(shape) == 1:
                tensor.zero_()
            if summed:
                return Kept(tensor, like.dtype, None, factor)
            rounding, pending = (factor, None) if final else scaling.split(factor, like.dtype)
            return Kept(tensor, like.dtype, rounding, pending)

        accumulate = plan.weight_gradient == "accumulate"
        return Gradients(
            keep((self.N, self.D), self.input, summed=False) if plan.grad_input else None,
            keep((self.V, self.D), self.linear_weight, summed=accumulate) if plan.grad_weight else None,
            keep((self.V,), self.linear_bias, summed=True) if plan.grad_bias else None,
        )

    def _empty_statistics(self) -> Statistics:
        return Statistics.empty(
            self.N, self.plan.sum_dtype, self.device, smooth=self.plan.label_smoothing > 0
        )

    def _rows(self, rows: slice) -> Tensor:
        """Tokens as [C, D] in the operands' dtype; a copy, of these rows alone, where a view will not do."""
        if self.input.dim() == 2:
            x_CD = self.input[rows]
        else:
            place_C = torch.arange(rows.start, rows.stop, device=self.device)
            places = []  # one index a dimension; torch.unravel_index would wait for the device
            for size in reversed(self.leading):
                places.append(place_C % size)
                place_C = place_C // size
            x_CD = self.input[tuple(reversed(places))]
        x_CD = x_CD.to(self.plan.compute_dtype)
        return x_CD.contiguous() if self.plan.copies_rows else x_CD

    def _blocks(self, size: int) -> Iterator[slice]:
        for start in range(0, self.V, size):
            yield slice(start, min(start + size, self.V))

    def _weight_block(self, classes: slice) -> Tensor:
        weight_BD = self.weight_VD[classes].to(self.plan.compute_dtype)
        # Without a unit stride the products would copy the whole, every time.
        return weight_BD if 1 in weight_BD.stride() else weight_BD.contiguous()

    def _buffer(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.plan.sum_dtype, device=self.device)


def product(out: Tensor, a: Tensor, b: Tensor, *, add: bool = False) -> None:
    """out (+)= a b, summed in out's dtype, whatever that of the operands."""
    widen = {} if out.dtype == a.dtype else {"out_dtype": out.dtype}
    if add:
        torch.addmm(out, a, b, out=out, **widen)
    else:
        torch.mm(a, b, out=out, **widen)


def _vector(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if vector is None else vector.to(dtype).contiguous()


def _flat_view(input: Tensor) -> Tensor:
    """[N, D] where that is a view of [..., D]; else the input as it is."""
    try:
        return input.view(math.prod(input.shape[:-1]), input.shape[-1])
    except RuntimeError:
        return input
