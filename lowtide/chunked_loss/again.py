"""Derivatives of the loss that are themselves to be differentiated, by recomputation.

A function of rows takes tensors that are cut and tensors that every chunk sees whole; it gives results of
rows, and sums over all rows. Its gradient is such a function again. So a derivative of any order is
computed chunk by chunk like the loss itself, and nothing of a chunk outlives its turn.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.chunked_loss.job import Job, Tensors
from lowtide.chunked_loss.replay import ours
from lowtide.chunked_loss.rows import cut
from lowtide.chunked_loss.sums import Sum

Both = tuple[Tensors, Tensors]


class Rows(NamedTuple):
    job: Job
    function: Callable[[int, Tensors, Tensors], Both]
    """(place of the chunk, what is cut, what is whole) -> (results of rows, sums over rows)"""
    cut: int
    """How many arguments are cut; they come first."""
    results: int
    """How many outputs are results of rows; they come first."""

    def __call__(self, *tensors: Tensor) -> Tensors:
        found: Tensors = _Apply.apply(self, *tensors)
        return found

    def run(self, *tensors: Tensor) -> Tensors:
        job, dims = self.job, len(self.job.leading)
        results: list[Tensor] = []
        sums: list[Sum] = []
        with job.replay.autocast():
            for place, (start, stop) in enumerate(job.chunks):
                pieces = tuple(cut(tensor, dims, start, stop) for tensor in tensors[: self.cut])
                parts, terms = self.function(place, pieces, tensors[self.cut :])
                if place == 0:
                    results = [part.new_empty((job.rows, *part.shape[1:])) for part in parts]
                    sums = [Sum() for _ in terms]
                for result, part in zip(results, parts):
                    result[start:stop] = part
                for total, term in zip(sums, terms):
                    total.add(term)
                del parts, terms  # before the next are made
        shaped = (result.view(*job.leading, *result.shape[1:]) for result in results)
        return (*shaped, *(total.total for total in sums))

    def gradients(self, wanted: Sequence[int], upstream: Sequence[int]) -> "Rows":
        """The gradients of the arguments at places `wanted`, given those of the outputs at places `upstream`.

        Arguments: what is cut (this one's rows, then the gradients of its results), then what is whole."""
        of_rows = sum(place < self.results for place in upstream)

        def function(place: int, rows: Tensors, whole: Tensors) -> Both:
            own = len(whole) - len(upstream) + of_rows
            given = dict(zip(upstream, (*rows[self.cut :], *whole[own:])))
            create_graph = torch.is_grad_enabled()
            own_rows, own_whole = _inputs(rows[: self.cut]), _inputs(whole[:own])
            asked = [(*own_rows, *own_whole)[each] for each in wanted]

            def run() -> Sequence[Tensor | None]:
                parts, terms = self.function(place, own_rows, own_whole)
                outputs = (*parts, *terms)
                # What was found without a graph depends on nothing that is asked for.
                pairs = [
                    (outputs[k], g.to(outputs[k].dtype)) for k, g in given.items() if outputs[k].requires_grad
                ]
                if not pairs:
                    return [None] * len(asked)
                with self.job.replay.no_autocast():
                    return torch.autograd.grad(
                        [output for output, _ in pairs],
                        asked,
                        [gradient for _, gradient in pairs],
                        create_graph=create_graph,
                        allow_unused=True,
                    )

            with torch.enable_grad(), ours():
                found = self.job.call.within(own_whole[: len(self.job.call.learned)], run)
            filled = tuple(torch.zeros_like(like) if g is None else g for g, like in zip(found, asked))
            return filled[:results], filled[results:]

        results = sum(place < self.cut for place in wanted)
        return Rows(self.job, function, self.cut + of_rows, results)


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Rows, *tensors: Tensor) -> Tensors:
        found = rows.run(*tensors)
        ctx.rows = rows
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return found

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        return (None, *pull_back(ctx.rows, tensors, upstream, ctx.needs_input_grad[1:]))


def pull_back(
    rows: Rows, tensors: Tensors, upstream: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors` that are needed, differentiable."""
    given = {place: gradient for place, gradient in enumerate(upstream) if gradient is not None}
    wanted = [place for place, need in enumerate(needed) if need]
    gradients: list[Tensor | None] = [None] * len(tensors)
    if given and wanted:
        derivative = rows.gradients(wanted, list(given))
        found = derivative(
            *tensors[: rows.cut],
            *(gradient for place, gradient in given.items() if place < rows.results),
            *tensors[rows.cut :],
            *(gradient for place, gradient in given.items() if place >= rows.results),
        )
        for place, gradient in zip(wanted, found):
            gradients[place] = gradient.to(tensors[place].dtype)
    return tuple(gradients)


def losses(job: Job, per_row: bool) -> Rows:
    """The loss itself, as it was computed the first time."""

    def function(place: int, rows: Tensors, whole: Tensors) -> Both:
        value = job.loss_again(place, rows, whole)
        return ((value,), ()) if per_row else ((), (value,))

    return Rows(job, function, job.cut, int(per_row))


def _inputs(tensors: Tensors) -> Tensors:
    """Tensors of their own to differentiate by, in the graph that there is."""
    with torch.enable_grad():
        return tuple(
            tensor.view_as(tensor)
            if tensor.requires_grad
            else tensor.detach().requires_grad_(tensor.is_floating_point())
            for tensor in tensors
        )
