"""The loop: the loss of each chunk and its gradients, and nothing else of it.

Sums over chunks are float32 for half precision (accumulate.py). Gradients of rows are written once, in the
rows' dtype.
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
Found = dict[int, Tensor | None]  # gradients by place among the tensors
Result = TypeVar("Result")


@dataclass
class Job:
    """Its tensors are those that are cut (hidden, then arguments), then those that are learned."""

    call: Call
    hidden: int
    """How many of those that are cut go into the head."""
    cut: int
    """How many are cut."""
    leading: torch.Size
    chunks: tuple[tuple[int, int], ...]
    wanted: tuple[bool, ...]
    """Which tensors need a gradient."""
    per_row: bool
    """Whether loss_fn may return a value a row."""
    has_aux: bool
    replay: Replay
    aux: dict[str, Sum] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """Of what it is computed from, when it was first."""
    constants: dict[str, Any] = field(default_factory=dict)
    """What its code reaches beside that, when it was first; once it has run, what it has not changed."""
    values: list[Tensor] = field(default_factory=list)
    """The loss of each chunk, when it was first."""
    meter: Callable[[int], Any] = contextlib.nullcontext
    """Of a chunk's place: what surrounds its computation."""

    @property
    def rows(self) -> int:
        return math.prod(self.leading)

    def piece(self, tensors: Sequence[Tensor], start: int, stop: int) -> Tensors:
        return tuple(cut(tensor, len(self.leading), start, stop) for tensor in tensors)

    def state_of(self, tensors: Tensors) -> dict[str, Any]:
        """With the versions of what is cut; after the call these are for autograd to compare."""
        hidden, rows = self.hidden, tensors[: self.cut]
        names = [f"hidden[{k}]" if k < hidden else f"token_tensors[{k - hidden}]" for k in range(self.cut)]
        versions = {name: 0 if row.is_inference() else row._version for name, row in zip(names, rows)}
        return versions | self.call.state()

    def changed(self, tensors: Tensors = ()) -> list[str]:
        """What is not as it was, by name."""
        return validation.changed(self.state, self.state_of(tensors))

    def check_unchanged(self) -> None:
        """Before a chunk is computed once more."""
        constants = validation.changed(self.constants, self.call.constants())
        validation.check_unchanged([*self.changed(), *constants])

    def settle(self) -> None:
        """After it is computed: what its own code changes, such as a counter, is no constant."""
        now = self.call.constants()
        self.constants = {key: was for key, was in self.constants.items() if key in now and now[key] == was}

    def loss(self, place: int, pieces: Tensors, learned: Tensors) -> tuple[Any, Tensor]:
        """(what the head gave, the loss) of a chunk, for the first time: everything about it is checked."""
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
        return self._run(place, pieces, learned)[1]

    def _run(self, place: int, pieces: Tensors, learned: Tensors) -> tuple[Any, Any, dict[str, Any]]:
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
        total = self.aux.setdefault(name, Sum())
        known = total.total
        if isinstance(known, Tensor) and isinstance(term, Tensor) and known.shape != term.shape:
            raise ArgumentError(
                f"aux[{name!r}] must be a sum over rows, of one shape in every chunk, got "
                f"{list(known.shape)} and then {list(term.shape)}"
            )
        total.add(term)


def loss_alone(job: Job, tensors: Tensors, *, graph: bool, values: list[Tensor] | None = None) -> Tensor:
    """The loss, or the losses of rows; with `graph`, each chunk has its own for as long as it is checked.
    `values` gets the loss of each chunk."""
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
    """The loss, and the gradients of its sum that are wanted, from one pass."""
    loop = _Loop(job, tensors, job.wanted)
    total = Sum()
    for place, (start, stop) in enumerate(job.chunks):
        total.add(loop.first(place, start, stop))
    job.settle()
    return total.total, loop.kept()


def form_again(
    job: Job, tensors: Tensors, wanted: Sequence[bool], upstream: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients that are wanted, given that of the loss."""
    job.check_unchanged()
    loop = _Loop(job, tensors, wanted)
    with job.replay.autocast(), alone(job.call.modules.values()):
        for place, (start, stop) in enumerate(job.chunks):
            loop.again(place, start, stop, upstream)
    return tuple(None if each is None else each.gradient for each in loop.kept())


def peak(job: Job, tensors: Tensors, rows: int) -> int:
    """Bytes that a chunk of so many rows takes, after a first one that makes room for the sums."""
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
        leaves = self._pieces(start, stop)

        def run() -> tuple[Tensor, Found]:
            with torch.enable_grad(), ours():
                out, value = self.job.loss(place, leaves, self.learned)
                value = value.sum() if value.dim() else value  # of each row, while a workspace is measured
            seed = self._lift(out, value, leaves) if self.lifted else None
            del out
            return value.detach(), self._pulled_back(value, leaves, seed)

        value, found = self._within(place, run)
        self._take(start, stop, found)
        return value

    def again(self, place: int, start: int, stop: int, upstream: Tensor) -> None:
        leaves = self._pieces(start, stop)
        rows = cut(upstream, upstream.dim(), start, stop) if upstream.dim() else upstream

        def run() -> Found:
            with torch.enable_grad(), ours():
                value = self.job.loss_again(place, leaves, self.learned)
            seed = self._compared(place, value.detach(), stop - start, rows)
            return self._pulled_back(value, leaves, seed.to(value.dtype))

        self._take(start, stop, self._within(place, run))

    def _compared(self, place: int, value: Tensor, rows: int, upstream: Tensor) -> Tensor:
        """The upstream gradient, if the chunk's loss is what it was the first time, to half the digits: what
        changes in a way that cannot be seen (call.constants) changes it. An error; on CUDA, where looking
        would mean waiting, NaN."""
        was, now = self.job.values[place], value.sum(dtype=sum_dtype(value.dtype))
        differs = (now - was).abs() > self.digits * (was.abs() + rows)
        if type(differs) is not Tensor or differs.is_cuda:
            return upstream.masked_fill(differs, torch.nan)
        if differs:
            validation.check_same_loss(float(was), float(now))
        return upstream

    def _within(self, place: int, run: Callable[[], Result]) -> Result:
        with self.job.meter(place), self.operators:
            return self.job.call.within(self.learned, run)

    def kept(self) -> list[Kept | None]:
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
                total.total = None  # before the next is rounded
        return kept

    def _pieces(self, start: int, stop: int) -> Tensors:
        return _leaves(self.job.piece(self.tensors[: self.job.cut], start, stop), self.wanted)

    def _pulled_back(self, value: Tensor, leaves: Tensors, upstream: Tensor | None) -> Found:
        if not value.requires_grad:
            return {}
        self.reached = True
        asked = {place: leaf for place, leaf in enumerate((*leaves, *self.learned)) if self.wanted[place]}
        with self.job.replay.no_autocast(), self.operators.collect(value):
            found = dict(
                zip(asked, torch.autograd.grad(value, list(asked.values()), upstream, allow_unused=True))
            )
        for place, leaf in asked.items():
            if leaf.grad is not None:  # by a backward pass that head or loss_fn ran within this one
                term = found[place]
                found[place] = leaf.grad if term is None else term + leaf.grad
                leaf.grad = None
        return found

    def _take(self, start: int, stop: int, found: Found) -> None:
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
        """For the gradients of all rows; those before `start` had none."""
        like = self.tensors[place]
        buffer = like.new_empty((self.job.rows, *like.shape[len(self.job.leading) :]))
        buffer[:start].zero_()
        return buffer

    def _lift(self, out: Any, value: Tensor, leaves: Tensors) -> Tensor:
        """What the chunk's backward starts from, a power of two; what is summed already is brought to it."""
        previous = self.lifts[-1] if self.lifts else torch.ones((), device=self.tensors[0].device)
        ends = [each for each in tree_leaves(out) if isinstance(each, Tensor) and each.requires_grad]
        if not ends:  # an object that hides them
            ends = [each for each in (*leaves, *self.learned) if each.requires_grad]
        new = previous
        if value.requires_grad and ends:
            with self.job.replay.no_autocast():
                found = torch.autograd.grad(value, ends, retain_graph=True, allow_unused=True)
            limit = 14 if value.dtype == torch.float16 else 60
            new = lift([each for each in found if each is not None], previous, limit)
            for leaf in (*leaves, *self.learned):
                leaf.grad = None  # where loss_fn's own backward put it
        for total in self.sums if self.lifts else ():
            if total is not None and total.total is not None:
                total.total.mul_(new / previous)
        self.lifts.append(new)
        return new.to(value.dtype)


def _checked(job: Job, place: int, pieces: Tensors, learned: Tensors, graph: bool) -> Tensor:
    leaves = _leaves(pieces, [graph and each for each in job.wanted])
    with ours(), job.meter(place), Operators():
        return job.call.within(learned, lambda: job.loss(place, leaves, learned)[1].detach())


def _placed(
    job: Job, losses: Tensor | None, total: Sum, value: Tensor, start: int, stop: int
) -> Tensor | None:
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
    return tuple(
        tensor.detach().requires_grad_(grad and tensor.is_floating_point())
        for tensor, grad in zip(tensors, wanted)
    )
