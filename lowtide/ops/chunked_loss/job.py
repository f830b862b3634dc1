"""Hold one call, and compute the loss of a chunk; check the chunk the first time."""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.core.matmul import blocks
from lowtide.core.strides import flattens, gathered_rows
from lowtide.ops.chunked_loss import validation
from lowtide.ops.chunked_loss.accumulate import Sum
from lowtide.ops.chunked_loss.functional.leaves import check_gone, own_leaves
from lowtide.ops.chunked_loss.functional.snapshot import Snapshot, unchanged
from lowtide.ops.chunked_loss.functional.tensors import Functional
from lowtide.ops.chunked_loss.isolation import any_transform
from lowtide.ops.chunked_loss.replay import Replay

Tensors = tuple[Tensor, ...]


@dataclass
class Job:
    """Hold a call and what its chunks need.

    The tensors of a job are in this order: hidden and the token tensors, which are cut into chunks;
    then the learned tensors (functional/tensors.py), which each chunk uses whole. The place of a
    tensor is its number in this order, and the place of a chunk is its number in `chunks`.
    """

    functional: Functional
    hidden: int
    """The number of tensors that are cut and passed to head."""
    row_names: tuple[str, ...]
    """The names of the tensors that are cut."""
    leading: torch.Size
    """The leading dimensions that the tensors that are cut share."""
    chunks: tuple[slice, ...]
    """The rows of each chunk."""
    needs_grad: tuple[bool, ...]
    """For each tensor of the job, True if it needs a gradient."""
    per_row: bool
    """True if loss_fn may return a value for each row."""
    has_aux: bool
    snapshot: Snapshot
    replay: Replay
    aux: dict[str, Sum] = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    """The loss of each chunk when it first ran, in mode "recompute"."""
    own: list[weakref.ref[Tensor]] = field(default_factory=list)
    """Leaves of the chunks' graphs that head or loss_fn seem to have made, in the first pass."""
    adds_up: bool = False
    """True once a loss that looked like a mean has been found to be a sum."""
    meter: Callable[[int], Any] = contextlib.nullcontext
    """Maps a chunk's place to a context manager under which the chunk is computed."""

    @property
    def cut(self) -> int:
        """Return how many tensors are cut."""
        return len(self.row_names)

    @property
    def rows(self) -> int:
        return math.prod(self.leading)

    def piece(self, tensors: Sequence[Tensor], chunk: slice) -> Tensors:
        """Return a chunk of each tensor, [c, ...] for c rows."""
        return tuple(_cut(tensor, len(self.leading), chunk) for tensor in tensors)

    def changed(self, tensors: Tensors) -> list[str]:
        """Return the names of tensors and training modes that have changed since the call began."""
        return self.snapshot.changed(dict(zip(self.row_names, tensors)))

    def loss(
        self, place: int, pieces: Tensors, learned: Tensors, operators: TorchFunctionMode
    ) -> tuple[Any, Tensor]:
        """Compute a chunk for the first time, with checks; return head's output and the loss."""
        with unchanged(self.functional, learned):
            out, value, aux = self.run(place, pieces, learned, operators)
        validation.check_result(value, len(pieces[0]), self.per_row)
        if not self.adds_up:
            validation.check_no_mean(
                value, len(pieces[0]), lambda: self._adds_up(place, pieces, learned, operators)
            )
        if value.requires_grad:
            found = own_leaves(self.functional, value, (*pieces, *learned))
            self.own += map(weakref.ref, found)
        for name, term in aux.items():
            self._add_aux(name, term.detach() if isinstance(term, Tensor) else term)
        return out, value

    def loss_again(
        self, place: int, pieces: Tensors, learned: Tensors, operators: TorchFunctionMode | None = None
    ) -> Tensor:
        """Return the loss of a chunk that was checked before."""
        value: Tensor = self.run(place, pieces, learned, operators)[1]
        if value.requires_grad:
            own_leaves(self.functional, value, (*pieces, *learned))  # for its errors
        return value

    def settle(self) -> None:
        """End the first pass over the chunks, with the checks that its end allows."""
        self.snapshot.settle()
        own, self.own = self.own, []
        check_gone(own)

    def run(
        self, place: int, pieces: Tensors, learned: Tensors, operators: TorchFunctionMode | None
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Return head's output, the loss and the aux of a chunk.

        The operators of operators.py are in place while head and loss_fn run, and no longer: they
        look at each access to a tensor's attributes.
        """
        with self.replay.chunk(place), operators or contextlib.nullcontext():
            out, value = self.functional(pieces[: self.hidden], pieces[self.hidden :], learned)
        aux = {}
        if self.has_aux:
            validation.check_aux(value)
            value, aux = value
        if is_dtensor(value) and not any(map(is_dtensor, pieces)):
            # The head's logits are DTensors. The gradients of rows are plain, and so must be that
            # of the loss, which they are multiplied by.
            value = value.full_tensor()
        return out, value, aux

    def eps(self, tensors: Iterable[Tensor]) -> float:
        """Return the precision of the coarsest dtype of these tensors and of autocast."""
        dtypes = {tensor.dtype for tensor in tensors}
        dtypes |= {dtype for _, dtype, enabled in self.replay.casts if enabled}
        return max(torch.finfo(each).eps for each in dtypes if each.is_floating_point or each.is_complex)

    def _adds_up(
        self, place: int, pieces: Tensors, learned: Tensors, operators: TorchFunctionMode
    ) -> bool | None:
        """Return True if the loss of half of a chunk's rows, given twice, is twice their loss.

        These are every second row, since the first ones may all be masked. Return None if this
        shows nothing: random numbers differ by row, and a value may be 0 or NaN.
        """
        capturing = self.replay.on_cuda and torch.cuda.is_current_stream_capturing()
        if capturing or any_transform() or self.replay.drew():
            return None
        halves = tuple(piece[1::2].detach() for piece in pieces)
        doubled = tuple(torch.cat([half, half]) for half in halves)
        try:
            with torch.no_grad():
                once, twice = (
                    float(self.run(place, each, learned, operators)[1]) for each in (halves, doubled)
                )
        except Exception:  # head or loss_fn needs gradients, or the number of rows that they got
            return None
        if not math.isfinite(once) or not math.isfinite(twice) or once == 0:
            return None
        # Closer than half the digits, so that a mean is seen also beside a larger sum.
        precision = self.eps((*pieces, *learned)) ** 0.5 / 32
        self.adds_up = abs(twice - 2 * once) <= precision * (abs(twice) + abs(2 * once))
        return self.adds_up

    def _add_aux(self, name: str, term: Any) -> None:
        total = self.aux.setdefault(name, Sum())
        known = total.total
        if isinstance(known, Tensor) and isinstance(term, Tensor) and known.shape != term.shape:
            raise ArgumentError(
                f"aux[{name!r}] must be a sum over rows, of one shape in every chunk, got "
                f"{list(known.shape)} and then {list(term.shape)}"
            )
        total.add(term)


def spans(rows: int, size: int) -> tuple[slice, ...]:
    """Return the rows of each chunk; for no rows, return one empty chunk."""
    return tuple(blocks(rows, size)) or (slice(0, 0),)


def _cut(tensor: Tensor, dims: int, chunk: slice) -> Tensor:
    """Return a chunk of a tensor whose first `dims` dimensions are rows.

    Return a view if the strides allow one. Otherwise, as for `hidden[:, :-1]`, return a copy of
    these rows alone.
    """
    if dims == 1:
        return tensor[chunk]
    leading = tensor.shape[:dims]
    if flattens(tensor, dims) or tensor.numel() == 0:
        return tensor.view(math.prod(leading), *tensor.shape[dims:])[chunk]
    return gathered_rows(tensor, leading, torch.arange(chunk.start, chunk.stop, device=tensor.device))
