"""One call: what is computed, on which tensors, in which chunks."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowtide.chunked_loss import check
from lowtide.chunked_loss.call import Call
from lowtide.chunked_loss.replay import Replay
from lowtide.chunked_loss.rows import cut
from lowtide.chunked_loss.sums import Sum

Tensors = tuple[Tensor, ...]


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
    meter: Callable[[int], Any] = contextlib.nullcontext
    """Of a chunk's place: what surrounds its computation."""

    @property
    def rows(self) -> int:
        return check.count(self.leading)

    def piece(self, tensors: Sequence[Tensor], start: int, stop: int) -> Tensors:
        return tuple(cut(tensor, len(self.leading), start, stop) for tensor in tensors)

    def loss(self, place: int, pieces: Tensors, learned: Tensors) -> tuple[Any, Tensor]:
        """(what the head gave, the loss) of a chunk, for the first time: everything about it is checked."""
        before = self.call.buffers()
        out, value, aux = self._run(place, pieces, learned)
        check.check_buffers(before, self.call.buffers())
        check.check_result(value, len(pieces[0]), self.per_row)
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
            raise check.ArgumentTypeError(
                f"with has_aux, loss_fn must return (sum, dict), got {type(value).__name__}"
            )
        value, aux = value
        check.check_aux(aux)
        return out, value, aux

    def _add_aux(self, name: str, term: Any) -> None:
        total = self.aux.setdefault(name, Sum())
        known = total.total
        if isinstance(known, Tensor) and isinstance(term, Tensor) and known.shape != term.shape:
            raise check.ArgumentError(
                f"aux[{name!r}] must be a sum over rows, of one shape in every chunk, got "
                f"{list(known.shape)} and then {list(term.shape)}"
            )
        total.add(term)
