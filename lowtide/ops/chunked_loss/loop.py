"""Loop over chunks: compute the loss of each and its gradients, and keep nothing else of it.

Sums over chunks are float32 for half precision (accumulate.py). Gradients of rows are written once,
in the rows' dtype.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.accumulate import Kept, Sum, lift, rounded, sum_dtype
from lowtide.ops.chunked_loss.chunks import Meter, Replay, cut, ours
from lowtide.ops.chunked_loss.functional import Call, alone
from lowtide.ops.chunked_loss.operators import Operators

Tensors = tuple[Tensor, ...]
Found = dict[int, Tensor | None]  # gradients by their place among the tensors
Result = TypeVar("Result")


@dataclass
class Job:
    """Hold a call and what its chunks need.

    Its tensors are those that are cut (hidden, then arguments), then those that are learned.
    """

    call: Call
    hidden: int
    """How many of the tensors that are cut go into the head."""
    cut: int
    """How many tensors are cut."""
    leading: torch.Size
    chunks: tuple[tuple[int, int], ...]
    wanted: tuple[bool, ...]
    """Which tensors need a gradient."""
    per_row: bool
    """True if loss_fn may return a value for each row."""
    has_aux: bool
    replay: Replay
    aux: dict[str, Sum] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """The state of the call's tensors and modules when it first ran."""
    constants: dict[str, Any] = field(default_factory=dict)
    """The other constants of its code when it first ran, less those that its own code changed."""
    values: list[Tensor] = field(default_factory=list)
    """The loss of each chunk when it first ran."""
    meter: Callable[[int], Any] = contextlib.nullcontext
    """Maps a chunk's place to the context in which it is computed."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return math.prod(self.leading)

    def piece(self, tensors: Sequence[Tensor], start: int, stop: int) -> Tensors:
        """Return rows [start, stop) of each tensor."""
        return tuple(cut(tensor, len(self.leading), start, stop) for tensor in tensors)

    def state_of(self, tensors: Tensors) -> dict[str, Any]:
        """Return the call's state and the versions of what is cut.

        Of what is cut, autograd compares the versions after the call.
        """
        hidden, rows = self.hidden, tensors[: self.cut]
        names = [f"hidden[{k}]" if k < hidden else f"token_tensors[{k - hidden}]" for k in range(self.cut)]
        versions = {name: 0 if row.is_inference() else row._version for name, row in zip(names, rows)}
        return versions | self.call.state()

    def changed(self, tensors: Tensors = ()) -> list[str]:
        """Return the names of what has changed since the first time."""
        return validation.changed(self.state, self.state_of(tensors))

    def check_unchanged(self) -> None:
        """Raise if anything changed before a chunk is computed again."""
        constants = validation.changed(self.constants, self.call.constants())
        validation.check_unchanged([*self.changed(), *constants])

    def settle(self) -> None:
        """Drop the constants that the call's own code has changed, such as a counter."""
        now = self.call.constants()
        self.constants = {key: was for key, was in self.constants.items() if key in now and now[key] == was}

    def loss(self, place: int, pieces: Tensors, learned: Tensors) -> tuple[Any, Tensor]:
        """Return what the head returned and the loss of a chunk, with the first time's checks."""
        before = self.call.buffers()
        out, value, aux = self._run(place, pieces, learned)
        validation.check_buffers(before, self.call.buffers())
        validation.check_result(value, len(pieces[0]), self.per_row)
        if value.requires_grad:
            self.call.unseen(value, (*pieces, *learned))
        for name, term in aux.items():
            self._add_aux(name, term.detach() if isinstance(term, Tensor) else term)
        return out, value

    def loss_again(self, place: int, pieces: Tensors, learned: Tensors) -> Tensor:
        """Return the loss of a chunk that was checked before."""
        return self._run(place, pieces, learned)[1]

    def _run(self, place: int, pieces: Tensors, learned: Tensors) -> tuple[Any, Any, dict[str, Any]]:
        """Return what the head returned, the loss and the aux of a chunk."""
        with self.replay.chunk(place):
            out, value = self.call(pieces[: self.hidden], pieces[self.hidden :], learned)
        if not self.has_aux:
            return out, value, {}
        if not isinstance(value, tuple) or len(value) != 2:
            raise ArgumentTypeError(
                f"with has_aux, loss_fn must return (sum, dict), got {type(value).__name__}"
            )
        value, aux = value
        validation.check_aux(aux)
        return out, value, aux

    def _add_aux(self, name: str, term: Any) -> None:
        """Add a chunk's value of aux to its sum."""
        total = self.aux.setdefault(name, Sum())
        known = total.total
        if isinstance(known, Tensor) and isinstance(term, Tensor) and known.shape != term.shape:
            raise ArgumentError(
                f"aux[{name!r}] must be a sum over rows, of one shape in every chunk, got "
                f"{list(known.shape)} and then {list(term.shape)}"
            )
        total.add(term)


def loss_alone(job: Job, tensors: Tensors, *, graph: bool, values: list[Tensor] | None = None) -> Tensor:
    """Return the loss, or the losses of rows, without gradients.

    With `graph`, each chunk has a graph for as long as it is checked. `values` gets the loss of
    each chunk.
    """
    total, losses = Sum(), None
    learned = _leaves(tensors[job.cut :], [graph] * len(tensors))
    with torch.set_grad_enabled(graph):
        for place, (start, stop) in enumerate(job.chunks):
            value = _checked(job, place, job.piece(tensors[: job.cut], start, stop), learned, graph)
            losses = _placed(job, losses, total, value, start, stop)
            if values is not None:
                values.append(value.sum(dtype=sum_dtype(value.dtype)))
    job.settle()
    return total.total if losses is None else losses


def form(job: Job, tensors: Tensors) -> tuple[Tensor, list[Kept | None]]:
    """Return the loss and the gradients asked for, from one pass."""
    loop = _Loop(job, tensors, job.wanted)
    total = Sum()
    for place, (start, stop) in enumerate(job.chunks):
        total.add(loop.first(place, start, stop))
    job.settle()
    return total.total, loop.kept()


def form_again(
    job: Job, tensors: Tensors, wanted: Sequence[bool], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients asked for, from the upstream gradient of the loss."""
    job.check_unchanged()
    loop = _Loop(job, tensors, wanted)
    with job.replay.autocast(), alone(job.call.modules.values()):
        for place, (start, stop) in enumerate(job.chunks):
            loop.again(place, start, stop, upstream)
    return tuple(None if each is None else each.gradient for each in loop.kept())


def peak(job: Job, tensors: Tensors, rows: int) -> int:
    """Return the bytes that a chunk of so many rows takes.

    A first chunk of one row allocates the sums, which do not count.
    """
    meter = Meter()
    sample = replace(
        job,
        chunks=((0, 1), (0, rows)),
        aux={},
        meter=lambda place: meter if place else contextlib.nullcontext(),
        replay=Replay(tensors),
    )
    with torch.random.fork_rng(devices=job.replay.cuda):
        if any(job.wanted):
            form(sample, tensors)
        else:
            loss_alone(sample, tensors, graph=False)
    return meter.peak


class _Loop:
    """Hold the gradients of one pass over the chunks."""

    def __init__(self, job: Job, tensors: Tensors, wanted: Sequence[bool]) -> None:
        self.job, self.tensors, self.wanted = job, tensors, wanted
        self.rows: list[Tensor | None] = [None] * job.cut
        self.learned = _leaves(tensors[job.cut :], wanted[job.cut :])
        self.sums = [Sum() if each else None for each in wanted[job.cut :]]
        self.operators = Operators(self.learned, self.sums)
        self.reached = False
        self.lifts: list[Tensor] = []
        dtypes = {tensor.dtype for tensor in tensors} | job.replay.autocast_dtypes
        self.digits = max(torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point) ** 0.5
        self.lifted = torch.float16 in dtypes

    def first(self, place: int, start: int, stop: int) -> Tensor:
        """Return the loss of a chunk and add its gradients, for the first time."""
        leaves = self._pieces(start, stop)

        def run() -> tuple[Tensor, Found]:
            with torch.enable_grad(), ours():
                out, value = self.job.loss(place, leaves, self.learned)
                # A value for each row, while a workspace is measured.
                value = value.sum() if value.dim() else value
            seed = self._lift(out, value, leaves) if self.lifted else None
            del out
            return value.detach(), self._pulled_back(value, leaves, seed)

        value, found = self._within(place, run)
        self._take(start, stop, found)
        return value

    def again(self, place: int, start: int, stop: int, upstream: Tensor) -> None:
        """Add the gradients of a chunk that is computed again."""
        leaves = self._pieces(start, stop)
        rows = cut(upstream, upstream.dim(), start, stop) if upstream.dim() else upstream

        def run() -> Found:
            with torch.enable_grad(), ours():
                value = self.job.loss_again(place, leaves, self.learned)
            seed = self._compared(place, value.detach(), stop - start, rows)
            return self._pulled_back(value, leaves, seed.to(value.dtype))

        self._take(start, stop, self._within(place, run))

    def _compared(self, place: int, value: Tensor, rows: int, upstream: Tensor) -> Tensor:
        """Return the upstream gradient, if the chunk's loss is the first one's to half the digits.

        A change that call.constants cannot see shows here. It raises; on CUDA, where looking would
        mean waiting, the gradient becomes NaN.
        """
        was, now = self.job.values[place], value.sum(dtype=sum_dtype(value.dtype))
        differs = (now - was).abs() > self.digits * (was.abs() + rows)
        if type(differs) is not Tensor or differs.is_cuda:
            return upstream.masked_fill(differs, torch.nan)
        if differs:
            validation.check_same_loss(float(was), float(now))
        return upstream

    def _within(self, place: int, run: Callable[[], Result]) -> Result:
        """Run a chunk with the learned tensors and the operators in place."""
        with self.job.meter(place), self.operators:
            return self.job.call.within(self.learned, run)

    def kept(self) -> list[Kept | None]:
        """Return the gradients of all tensors, with the factors that are left."""
        job, kept = self.job, list[Kept | None]()
        lifts = torch.stack(self.lifts) if self.lifts else None
        for tensor, gradient, wanted in zip(self.tensors, self.rows, self.wanted):
            if not wanted or (gradient is None and self.reached):
                kept.append(None)
            elif gradient is None:
                kept.append(Kept(torch.zeros_like(tensor)))
            else:
                factor = None if lifts is None else 1 / lifts
                kept.append(Kept(gradient.view(tensor.shape), factor))
        for place, total in enumerate(self.sums):
            tensor = self.tensors[job.cut + place]
            if total is None or (total.total is None and self.reached):
                kept.append(None)
            elif total.total is None:
                kept.append(Kept(torch.zeros_like(tensor)))
            else:
                kept.append(rounded(total.total, tensor.dtype, self.lifts[-1] if self.lifts else None))
                total.total = None  # freed before the next is rounded
        return kept

    def _pieces(self, start: int, stop: int) -> Tensors:
        """Return a chunk's rows as leaves of its graph."""
        return _leaves(self.job.piece(self.tensors[: self.job.cut], start, stop), self.wanted)

    def _pulled_back(self, value: Tensor, leaves: Tensors, upstream: Tensor | None) -> Found:
        """Return the gradients of a chunk by their place among the tensors."""
        if not value.requires_grad:
            return {}
        self.reached = True
        asked = {place: leaf for place, leaf in enumerate((*leaves, *self.learned)) if self.wanted[place]}
        with self.job.replay.no_autocast(), self.operators.collect(value):
            found = dict(
                zip(asked, torch.autograd.grad(value, list(asked.values()), upstream, allow_unused=True))
            )
        for place, leaf in asked.items():
            # From a backward pass that head or loss_fn ran within this one.
            if leaf.grad is not None:
                term = found[place]
                found[place] = leaf.grad if term is None else term + leaf.grad
                leaf.grad = None
        return found

    def _take(self, start: int, stop: int, found: Found) -> None:
        """Write a chunk's gradients of rows, and add those of learned tensors to their sums."""
        for place, term in enumerate([found.pop(place, None) for place in range(self.job.cut)]):
            if term is not None and self.rows[place] is None:
                self.rows[place] = self._buffer(place, start)
            gradient = self.rows[place]
            if gradient is not None:
                gradient[start:stop] = 0 if term is None else term
        while found:
            place, term = found.popitem()
            total = self.sums[place - self.job.cut]
            if term is not None and total is not None:
                total.add(term)
            del term

    def _buffer(self, place: int, start: int) -> Tensor:
        """Return memory for the gradients of all rows; those before `start` are 0."""
        like = self.tensors[place]
        buffer = like.new_empty((self.job.rows, *like.shape[len(self.job.leading) :]))
        buffer[:start].zero_()
        return buffer

    def _lift(self, out: Any, value: Tensor, leaves: Tensors) -> Tensor:
        """Return the power of two that the chunk's backward starts from.

        It also brings the sums so far to this power.
        """
        previous = self.lifts[-1] if self.lifts else torch.ones((), device=self.tensors[0].device)
        ends = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.requires_grad]
        if not ends:  # head returned an object that hides its tensors
            ends = [each for each in (*leaves, *self.learned) if each.requires_grad]
        new = previous
        if value.requires_grad and ends:
            with self.job.replay.no_autocast():
                found = torch.autograd.grad(value, ends, retain_graph=True, allow_unused=True)
            limit = 14 if value.dtype == torch.float16 else 60
            new = lift([each for each in found if each is not None], previous, limit)
            for leaf in (*leaves, *self.learned):
                leaf.grad = None  # loss_fn's own backward put it there
        for total in self.sums if self.lifts else ():
            if total is not None and total.total is not None:
                total.total.mul_(new / previous)
        self.lifts.append(new)
        return new.to(value.dtype)


def _checked(job: Job, place: int, pieces: Tensors, learned: Tensors, graph: bool) -> Tensor:
    """Return the loss of a chunk without its gradients, for the first time."""
    leaves = _leaves(pieces, [graph and each for each in job.wanted])
    with ours(), job.meter(place), Operators():
        return job.call.within(learned, lambda: job.loss(place, leaves, learned)[1].detach())


def _placed(
    job: Job, losses: Tensor | None, total: Sum, value: Tensor, start: int, stop: int
) -> Tensor | None:
    """Add a chunk's loss to the total, or write the losses of its rows."""
    if (losses if value.dim() == 0 else total.total) is not None:
        raise ArgumentError(
            "loss_fn must return a sum for every chunk, or a value for each row for every chunk, got both; "
            "for a chunk in which nothing counts return zeros of the same kind"
        )
    if value.dim() == 0:
        total.add(value)
        return None
    if losses is None:
        losses = value.new_empty(job.leading)
    losses.view(-1)[start:stop] = value
    return losses


def _leaves(tensors: Sequence[Tensor], wanted: Sequence[bool]) -> Tensors:
    """Return detached copies that share the tensors' memory, with a gradient where asked for."""
    return tuple(
        tensor.detach().requires_grad_(grad and tensor.is_floating_point())
        for tensor, grad in zip(tensors, wanted)
    )
