"""Loop over the chunks: compute the loss and the gradients of each, and keep nothing else of it.

Half-precision terms are summed over chunks in float32 (accumulate.py). Gradients of rows are
written once, in the rows' dtype.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowtide.core.errors import ArgumentError
from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.chunked_loss.accumulate import Sum, backward_scale, may_be_retained, rounded, sum_dtype
from lowtide.ops.chunked_loss.functional.leaves import ChunkPass, kept_error
from lowtide.ops.chunked_loss.functional.snapshot import other_loss
from lowtide.ops.chunked_loss.functional.threads import alone
from lowtide.ops.chunked_loss.isolation import isolated
from lowtide.ops.chunked_loss.job import Job, Tensors
from lowtide.ops.chunked_loss.operators import GradientSumMode

Gradients = dict[int, Tensor | None]  # from the place of a tensor in the job
Result = TypeVar("Result")


def loss_alone(job: Job, tensors: Tensors, *, graph: bool, values: list[Tensor] | None = None) -> Tensor:
    """Return the loss, or the losses of rows, without gradients.

    With `graph`, each chunk has a graph while it is checked: the graph shows parameters that come
    through closures. The loss of each chunk is appended to `values`, if given.
    """
    total, losses = Sum(), None
    with ChunkPass() as now, torch.set_grad_enabled(graph):
        learned = now.leaves(tensors[job.cut :], [graph] * len(tensors))
        for place, chunk in enumerate(job.chunks):
            pieces = job.piece(tensors[: job.cut], chunk)
            pieces = now.leaves(pieces, [graph and each for each in job.needs_grad])
            value = _checked(job, place, pieces, learned)
            if (losses if value.dim() == 0 else total.total) is not None:
                raise ArgumentError(
                    "loss_fn must return a sum for every chunk, or a value for each row for every chunk, "
                    "got both; for a chunk in which nothing counts return zeros of the same kind"
                )
            if value.dim() == 0:
                total.add(value)
            else:
                losses = value.new_empty(job.leading) if losses is None else losses
                losses.view(-1)[chunk] = value
            if values is not None:
                values.append(value.sum(dtype=sum_dtype(value.dtype)))
    job.settle()
    return total.total if losses is None else losses


def _checked(job: Job, place: int, pieces: Tensors, learned: Tensors) -> Tensor:
    """Compute a chunk for the first time, with checks, and return its loss without a graph."""
    operators = GradientSumMode()
    with isolated(), job.meter(place):
        return job.functional.substituted(
            learned, lambda: job.loss(place, pieces, learned, operators)[1].detach()
        )


def loss_and_gradients(job: Job, tensors: Tensors) -> tuple[Tensor, list[PendingGradient | None]]:
    """Return the loss and the gradients that are needed, from one pass over the chunks."""
    total = Sum()
    with ChunkPass() as now:
        loop = _Loop(job, tensors, job.needs_grad, now)
        for place, chunk in enumerate(job.chunks):
            total.add(loop.first(place, chunk))
    job.settle()
    return total.total, loop.gradients()


def recomputed_gradients(
    job: Job, tensors: Tensors, needs_grad: Sequence[bool], grad_output: Tensor
) -> tuple[Tensor | None, ...]:
    """Compute the chunks again, and return the gradients that are needed."""
    job.snapshot.check()
    with ChunkPass() as now, job.replay.autocast(), alone(job.functional.modules.values()):
        loop = _Loop(job, tensors, needs_grad, now)
        for place, chunk in enumerate(job.chunks):
            loop.again(place, chunk, grad_output)
    return tuple(None if each is None else each.tensor for each in loop.gradients())


class _Loop:
    """Hold the gradients of one pass over the chunks."""

    def __init__(self, job: Job, tensors: Tensors, needs_grad: Sequence[bool], now: ChunkPass) -> None:
        self.job, self.tensors, self.needs_grad, self.now = job, tensors, needs_grad, now
        self.rows: list[Tensor | None] = [None] * job.cut
        self.learned = now.leaves(tensors[job.cut :], needs_grad[job.cut :])
        self.sums = [Sum() if each else None for each in needs_grad[job.cut :]]
        self.operators = GradientSumMode(self.learned, self.sums)
        self.has_graph = False
        self.scales: list[Tensor] = []
        self.digits = job.eps(tensors) ** 0.5
        casts = {dtype for _, dtype, enabled in job.replay.casts if enabled}
        self.is_scaled = torch.float16 in casts | {tensor.dtype for tensor in tensors}

    def first(self, place: int, chunk: slice) -> Tensor:
        """Compute a chunk for the first time, add its gradients, and return its loss."""
        leaves = self._pieces(chunk)

        def run() -> tuple[Tensor, Gradients]:
            with torch.enable_grad(), isolated():
                out, value = self.job.loss(place, leaves, self.learned, self.operators)
                # A value for each row occurs only while a workspace is measured: take any scalar.
                value = value.sum() if value.dim() else value
            seed = self._scale(place, out, value, leaves) if self.is_scaled else None
            del out
            return value.detach(), self._backward(value, leaves, seed)

        value, gradients = self._substituted(place, run)
        self._add(chunk, gradients)
        return value

    def again(self, place: int, chunk: slice, grad_output: Tensor) -> None:
        """Compute a chunk again and add its gradients."""
        leaves = self._pieces(chunk)
        seed = self.job.piece((grad_output,), chunk)[0] if grad_output.dim() else grad_output

        def run() -> Gradients:
            with torch.enable_grad(), isolated():
                value = self.job.loss_again(place, leaves, self.learned, self.operators)
            compared = self._compared(place, value.detach(), chunk.stop - chunk.start, seed)
            return self._backward(value, leaves, compared.to(value.dtype))

        self._add(chunk, self._substituted(place, run))

    def gradients(self) -> list[PendingGradient | None]:
        """Return the gradient of each tensor, with the factor that remains to be applied.

        Return None for a tensor that no chunk reached. If no chunk has a graph, the gradients that
        are needed are zeros.
        """
        if not self.has_graph:
            return [
                PendingGradient(torch.zeros_like(tensor)) if needs_grad else None
                for tensor, needs_grad in zip(self.tensors, self.needs_grad)
            ]
        row_factors = 1 / torch.stack(self.scales) if self.scales else None
        last_scale = self.scales[-1] if self.scales else None
        gradients = [
            None if rows is None else PendingGradient(rows.view(tensor.shape), remaining=row_factors)
            for tensor, rows in zip(self.tensors, self.rows)
        ]
        for tensor, total in zip(self.tensors[self.job.cut :], self.sums):
            if total is None or total.total is None:
                gradients.append(None)
            else:
                gradients.append(rounded(total.total, tensor.dtype, last_scale))
                total.total = None  # free it before the next one is rounded
        return gradients

    def _pieces(self, chunk: slice) -> Tensors:
        """Return a chunk of each tensor that is cut, as leaves of the chunk's graph."""
        return self.now.leaves(self.job.piece(self.tensors[: self.job.cut], chunk), self.needs_grad)

    def _substituted(self, place: int, run: Callable[[], Result]) -> Result:
        """Run a chunk on copies of the learned tensors."""
        with self.job.meter(place):
            return self.job.functional.substituted(self.learned, run)

    def _compared(self, place: int, value: Tensor, rows: int, seed: Tensor) -> Tensor:
        """Return `seed`, from which backward starts, if the chunk's loss is what it was at first.

        The two losses must agree to half the digits of the coarsest dtype. If they do not,
        something has changed that the snapshot does not see: raise an error. On CUDA, return a seed
        of NaN instead, because reading the result of the comparison would wait for the device.
        """
        was, now = self.job.losses[place], value.sum(dtype=sum_dtype(value.dtype))
        differs = (now - was).abs() > self.digits * (was.abs() + rows)
        if type(differs) is not Tensor or differs.device.type in ("cuda", "meta"):
            return seed.masked_fill(differs, torch.nan)
        if differs:
            raise other_loss(float(was), float(now))
        return seed

    def _backward(self, value: Tensor, leaves: Tensors, seed: Tensor | None) -> Gradients:
        if not value.requires_grad:
            return {}
        self.has_graph = True
        asked = {k: leaf for k, leaf in enumerate((*leaves, *self.learned)) if self.needs_grad[k]}
        with self.job.replay.autocast(on=False), self.operators.collect(value):
            try:
                terms = torch.autograd.grad(value, list(asked.values()), seed, allow_unused=True)
            except RuntimeError as error:
                if "through the graph a second time" in str(error):
                    raise kept_error() from error
                raise
        gradients = dict(zip(asked, terms))
        del terms
        for k, leaf in asked.items():
            # A backward pass that head or loss_fn ran within this one has added to leaf.grad.
            if leaf.grad is not None:
                term = gradients[k]
                gradients[k] = leaf.grad if term is None else term + leaf.grad
                leaf.grad = None
        return gradients

    def _add(self, chunk: slice, gradients: Gradients) -> None:
        """Write a chunk's gradients of rows, and add those of learned tensors to their sums."""
        cut = self.job.cut
        for k, term in enumerate([gradients.pop(k, None) for k in range(cut)]):
            rows = self.rows[k]
            if rows is None and term is not None:
                shape = self.tensors[k].shape[len(self.job.leading) :]
                rows = self.rows[k] = self.tensors[k].new_empty((self.job.rows, *shape))
                rows[: chunk.start].zero_()  # no chunk before this one reached the tensor
            if rows is not None:
                rows[chunk] = 0 if term is None else term
        while gradients:
            k, term = gradients.popitem()
            total = self.sums[k - cut]
            if term is not None and total is not None:
                total.add(term)
            del term

    def _scale(self, place: int, out: Any, value: Tensor, leaves: Tensors) -> Tensor:
        """Return the power of two that the chunk's backward starts from.

        Rescale the sums over earlier chunks, which have the previous chunk's power, to this one.
        """
        previous = self.scales[-1] if self.scales else torch.ones((), device=self.tensors[0].device)
        new, retains = previous, may_be_retained(value)
        if not retains:
            with torch.enable_grad(), isolated():
                out, value, _ = self.job.run(place, leaves, self.learned, self.operators)
                value = value.sum() if value.dim() else value
        ends = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.requires_grad]
        if not ends:  # head returned an object whose tensors pytree does not find
            ends = [each for each in (*leaves, *self.learned) if each.requires_grad]
        if value.requires_grad and ends:
            # Leave hidden out: its gradient would take a GEMM of its own.
            others = (*leaves[self.job.hidden :], *self.learned)
            rest = [each for each in others if each.requires_grad and not self.operators.sums_up(each)]
            with self.job.replay.autocast(on=False):
                new = backward_scale(value, ends, rest, previous, retain_graph=retains)
            for leaf in (*leaves, *self.learned):
                leaf.grad = None  # a backward pass within loss_fn has added to it
        for total in self.sums if self.scales else ():
            if total is not None and total.total is not None:
                total.total.mul_(new / previous)
        self.scales.append(new)
        return new.to(value.dtype)
