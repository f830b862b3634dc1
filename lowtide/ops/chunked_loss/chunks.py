"""A chunk: which rows it has, how many it may have, and what is kept so that it can be computed again.

Rows within a workspace are counted as the operators hand out tensors, in chunks of growing size: a number
that depends on shapes alone, so that every rank finds the same without asking the others. Memory is the
largest of several sums, each straight in the number of rows; so between two measured sizes it stays below
the line through both.
"""

import contextlib
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.core.errors import ArgumentError

GROWTH = 16  # from one measured size to the next, at most

# Rows, whatever the leading dimensions and strides.


def spans(rows: int, size: int) -> tuple[tuple[int, int], ...]:
    """[start, stop) of each chunk; one, empty, where there are no rows."""
    return tuple((start, min(start + size, rows)) for start in range(0, max(rows, 1), size))


def cut(tensor: Tensor, dims: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a tensor with `dims` leading dimensions, as [c, ...]: a view, or a copy of these
    rows alone where a view will not do (`hidden[:, :-1]`)."""
    if dims == 1:
        return tensor[start:stop]
    leading = tensor.shape[:dims]
    if _is_flat(tensor, dims):
        return tensor.view(math.prod(leading), *tensor.shape[dims:])[start:stop]
    place = torch.arange(start, stop, device=tensor.device)
    places = []  # one index a dimension; torch.unravel_index would wait for the device
    for size in reversed(leading):
        places.append(place % size)
        place = place // size
    return tensor[tuple(reversed(places))]


def _is_flat(tensor: Tensor, dims: int) -> bool:
    """Whether the leading dimensions are one in memory."""
    sizes, strides = tensor.shape[:dims], tensor.stride()[:dims]
    if tensor.numel() == 0:
        return True
    kept = [(size, stride) for size, stride in zip(sizes, strides) if size > 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(kept))


# How many.


def most_rows(workspace: int, limit: int, peak: Callable[[int], int]) -> int:
    """Up to `limit` rows of which a chunk takes no more than so many bytes; `peak` runs one and counts."""
    rows, held = 1, peak(1)
    if held > workspace:
        raise ArgumentError(
            f"workspace must hold a chunk of one row, which takes {held} bytes, got {workspace} bytes"
        )
    slope = held
    while rows < limit:
        more = min(limit, GROWTH * rows, rows + (workspace - held) // max(1, slope))
        if more == rows:
            break
        found = peak(more)
        if found > workspace:
            return rows + (workspace - held) * (more - rows) // (found - held)
        slope = (found - held) // (more - rows)
        rows, held = more, found
    return rows


class Meter(TorchDispatchMode):
    """Counts the bytes of every tensor that an operator makes, from its making to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if (
                isinstance(each, Tensor)
                and (storage := _storage(each)) not in given
                and storage not in self.seen
            ):
                self.seen.add(storage)
                self._hold(storage.nbytes())
                weakref.finalize(storage, self._hold, -storage.nbytes())
        return found

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


# Once more.


class Replay:
    """The state of the random number generators at the start of each chunk, and autocast."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self.cuda = sorted({device.index for device in devices if device.type == "cuda"})
        self.kinds = sorted({"cpu", *(device.type for device in devices if device.type != "meta")})
        self.casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in self.kinds
        ]
        self.cached = torch.is_autocast_cache_enabled()
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @property
    def autocast_dtypes(self) -> set[torch.dtype]:
        return {dtype for _, dtype, enabled in self.casts if enabled}

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """As it was when the loss was called."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            yield

    @contextlib.contextmanager
    def no_autocast(self) -> Iterator[None]:
        """A backward pass runs in the dtypes of its forward pass, whatever surrounds it."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, False, self.cached))
            yield

    @contextlib.contextmanager
    def chunk(self, place: int) -> Iterator[None]:
        """The first time, the generators go on from where they are; from then on, as they did that time."""
        if place not in self.states:
            if not (self.cuda and torch.cuda.is_current_stream_capturing()):
                self.states[place] = self._state(self.states.get(place - 1))
            yield
            return
        with torch.random.fork_rng(devices=self.cuda):
            cpu, *cuda = self.states[place]
            torch.set_rng_state(cpu)
            for device, state in zip(self.cuda, cuda):
                torch.cuda.set_rng_state(state, device)
            yield

    def drew(self) -> bool:
        """Whether anything random has happened since the first chunk began."""
        first = self.states.get(0)
        return first is not None and self._state(first) is not first

    def _state(self, last: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """The last one again if nothing random has happened since: they are 5 KB each."""
        now = (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.cuda))
        return last if last and all(torch.equal(*each) for each in zip(now, last)) else now


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Within, saved tensors are held as they are. Hooks from outside (activation checkpointing, offloading)
    are for what waits for backward; a chunk's own graph is gone before. Where there are none, none are put
    in their place: torch.func, which head or loss_fn may use, allows none. Forward mode, which they may use
    as well, is off in an autograd.Function."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        if _top_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        yield


def is_ours() -> bool:
    """Whether nobody within has put hooks of their own on top, or transforms, or forward mode."""
    hooks = _top_hooks()
    transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    return not transformed and (hooks is None or hooks[0] is _pack)


def _top_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    # An output that held itself by its graph would live until garbage is collected.
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    tensor, version = packed
    if tensor._version != version:  # autograd's own check is off where there are hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)}, in head or loss_fn"
        )
    return tensor
