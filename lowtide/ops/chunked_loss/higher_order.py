"""Compute the loss as a rowwise function (core/rowwise/), with derivatives of any order.

Three things need it: a backward with create_graph=True, the transforms of torch.func, and forward
mode. Each derivative is computed chunk by chunk like the loss itself, and nothing of a chunk is
kept after it.

torch.autograd differentiates each chunk on its own. So head and loss_fn may use what an ordinary
backward pass supports: autocast, checkpoints, autograd functions of their own.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private
from lowtide.core.rowwise.row_function import RowDerivative, RowFunction
from lowtide.core.rowwise.variables import Both, Tensors, as_variables, at, split
from lowtide.ops.chunked_loss.accumulate import Sum
from lowtide.ops.chunked_loss.functional.leaves import captured_error, captured_names
from lowtide.ops.chunked_loss.functional.snapshot import Snapshot, check_none
from lowtide.ops.chunked_loss.isolation import isolated
from lowtide.ops.chunked_loss.job import Job
from lowtide.ops.chunked_loss.loop import loss_alone
from lowtide.ops.chunked_loss.replay import Replay


def loss_in_transform(job: Job, tensors: Tensors) -> Tensor:
    """Return the loss, which can be differentiated in any way; put aux into the job."""
    _check_closures(job, tensors)
    loss, *aux = First.of(job, 0)(*tensors)
    for name, total in zip(job.aux, aux):
        job.aux[name].total = total
    return loss


def _check_closures(job: Job, tensors: Tensors) -> None:
    """Raise if the loss depends on a varying tensor other than `tensors`.

    A tensor varies if a transform or forward mode differentiates or batches it. A derivative with
    respect to any other tensor would be lost. To find one, run the chunks on values of `tensors`
    that do not vary: then the loss must not vary either.
    """
    still = tuple(_still(tensor) for tensor in tensors)
    before = Snapshot(job.functional, dict(zip(job.row_names, still)), job.snapshot.constants)
    sample = replace(job, aux={}, replay=Replay(still), snapshot=before)
    whole = still[job.cut :]

    with job.replay.forked():
        for place, chunk in enumerate(job.chunks):
            rows = sample.piece(still[: job.cut], chunk)
            run = functools.partial(sample.loss_again, place, rows, whole)
            value = job.functional.substituted(whole, run)
            batched = any(torch_private.is_batched(each) for each in _layers(value))
            if batched and sample.replay.drew():
                raise RuntimeError(
                    "vmap: head or loss_fn draws random numbers, which chunked_loss draws once for all "
                    "elements of the batch: pass randomness='same' to vmap"
                )
            if _varies(value):
                raise captured_error(captured_names(job.functional, _varies) or ["a tensor"])
    check_none(sample.changed(still))


def _still(tensor: Tensor) -> Tensor:
    """Return a tensor's values outside of all transforms; of a batch, its first element."""
    for layer in _layers(tensor):
        tensor = layer
    return forward_ad.unpack_dual(tensor).primal.detach()


def _varies(tensor: Tensor) -> bool:
    """Return True if a tensor requires a gradient, is a batch or has a tangent in any transform."""
    return any(
        layer.requires_grad
        or torch_private.is_batched(layer)
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(layer).tangent is not None)
        for layer in _layers(tensor)
    )


def _layers(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensor as each transform sees it, from the innermost transform to the outermost.

    A batch is represented by its first element.
    """
    yield tensor
    while torch_private.is_wrapped(tensor):
        place = torch._C._functorch.maybe_get_bdim(tensor) if torch_private.is_batched(tensor) else -1
        tensor = torch._C._functorch.get_unwrapped(tensor)
        tensor = tensor if place < 0 else tensor.select(place, 0)
        yield tensor


@dataclass
class Rows(RowFunction):
    """Represent a rowwise function, computed over the job's chunks.

    Each chunk has the random numbers and the autocast settings of the call.
    """

    job: Job
    function: Callable[[int, Tensors, Tensors], Both]
    """(place of the chunk, rows of what is cut, what is whole) -> (results of rows, sums)"""
    cut: int
    results: int

    @classmethod
    def of(cls, job: Job, results: int) -> "Rows":
        """Return the loss as a rowwise function, which computes the chunks again.

        `results` is 1 if loss_fn returns a value for each row, 0 if it returns a sum.
        """

        def function(place: int, rows: Tensors, whole: Tensors) -> Both:
            value = job.loss_again(place, rows, whole)
            return ((value,), ()) if value.dim() else ((), (value,))

        return cls(job, function, job.cut, results)

    def run(self, *tensors: Tensor) -> Tensors:
        """Return the results of all rows and the sums over rows, chunk by chunk."""
        job = self.job
        job.snapshot.check()
        results: list[Tensor] = []
        sums: list[Sum] = []
        with job.replay.autocast():
            for place, chunk in enumerate(job.chunks):
                pieces = job.piece(tensors[: self.cut], chunk)
                parts, terms = self.function(place, pieces, tensors[self.cut :])
                if place == 0:
                    results = [part.new_empty((job.rows, *part.shape[1:])) for part in parts]
                    sums = [Sum() for _ in terms]
                for result, part in zip(results, parts):
                    result[chunk] = part
                for total, term in zip(sums, terms):
                    total.add(term)
                del parts, terms  # free them before the next ones are made
        shaped = (result.view(*job.leading, *result.shape[1:]) for result in results)
        return (*shaped, *(total.total for total in sums))

    def derivative(self, described: RowDerivative, given_rows: int, given_whole: int) -> "Rows":
        def function(place: int, rows: Tensors, whole: Tensors) -> Both:
            whole, last = split(whole, len(whole) - given_whole)
            given, create_graph = (*rows[self.cut :], *last), torch.is_grad_enabled()
            rows, whole = as_variables(rows[: self.cut]), as_variables(whole)
            inputs = at(described.inputs, (*rows, *whole))

            def run() -> Tensors:
                parts, terms = self.function(place, rows, whole)
                outputs = at(described.outputs, (*parts, *terms))
                with self.job.replay.autocast(on=False):
                    return described.derive(outputs, inputs, given, create_graph)

            functional = self.job.functional
            with torch.enable_grad(), isolated():
                derivatives = functional.substituted(whole[: len(functional.learned)], run)
            return split(derivatives, described.results)

        return Rows(self.job, function, self.cut + given_rows, described.results)


@dataclass
class First(Rows):
    """Represent the loss when it is first computed: check each chunk and add up aux."""

    def run(self, *tensors: Tensor) -> Tensors:
        """Return the loss, then the values of aux."""
        job = self.job
        job.aux.clear()
        loss = loss_alone(job, tensors, graph=True)
        aux = [torch.as_tensor(total.total, device=loss.device) for total in job.aux.values()]
        self.results, self.constants = int(loss.dim() > 0), len(aux)
        return (loss, *aux)
