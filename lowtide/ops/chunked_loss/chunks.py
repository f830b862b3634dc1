"""Cut rows into chunks, find how many rows fit, and keep the state to compute a chunk again.

Rows that fit a workspace are found by counting the bytes of the tensors that operators return, in
chunks of growing size. The count depends on shapes alone, so every rank finds the same number
without asking the others. A chunk's memory is the largest of several sums, each linear in the
number of rows. So between two measured sizes it stays below the line through both.
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

GROWTH = 16  # the largest factor from one measured size to the next

# Rows, for any leading dimensions and strides.


def spans(rows: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return [start, stop) of each chunk; without rows, one empty chunk."""
    return tuple((start, min(start + size, rows)) for start in range(0, max(rows, 1), size))


def cut(tensor: Tensor, dims: int, start: int, stop: int) -> Tensor:
    """Return rows [start, stop) of a tensor with `dims` leading dimensions, as [c, ...].

    It is a view; or a copy of these rows alone, where the strides allow no view (`hidden[:, :-1]`).
    """
    if dims == 1:
        return tensor[start:stop]
    leading = tensor.shape[:dims]
    if _is_flat(tensor, dims):
        return tensor.view(math.prod(leading), *tensor.shape[dims:])[start:stop]
    place = torch.arange(start, stop, device=tensor.device)
    places = []  # one index for each dimension; torch.unravel_index would wait for the device
    for size in reversed(leading):
        places.append(place % size)
        place = place // size
    return tensor[tuple(reversed(places))]


def _is_flat(tensor: Tensor, dims: int) -> bool:
    """Return True if the leading dimensions are one dimension in memory."""
    sizes, strides = tensor.shape[:dims], tensor.stride()[:dims]
    if tensor.numel() == 0:
        return True
    kept = [(size, stride) for size, stride in zip(sizes, strides) if size > 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(kept))


# How many rows fit.


def most_rows(workspace: int, limit: int, peak: Callable[[int], int]) -> int:
    """Return how many rows, up to `limit`, a chunk may have within the workspace.

    `peak` runs a chunk of so many rows and returns its bytes.
    """
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
    """Count the bytes of the tensors that operators return, from their creation to their end."""

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


# State to compute a chunk again.


class Replay:
    """Hold the generators' states at the start of each chunk, and the autocast settings."""

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
        """Return the dtypes of the autocast that was enabled."""
        return {dtype for _, dtype, enabled in self.casts if enabled}

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """Restore the autocast settings of the call."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cached))
            yield

    @contextlib.contextmanager
    def no_autocast(self) -> Iterator[None]:
        """Switch autocast off, since backward runs in the dtypes of its forward pass."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, False, self.cached))
            yield

    @contextlib.contextmanager
    def chunk(self, place: int) -> Iterator[None]:
        """Draw the same random numbers every time a chunk is computed.

        The first time, the generators go on from where they are, and their states are kept.
        """
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
        """Return True if random numbers were drawn since the first chunk began."""
        first = self.states.get(0)
        return first is not None and self._state(first) is not first

    def _state(self, last: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Return the generators' states, or the last ones if they are the same: 5 KB each."""
        now = (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.cuda))
        return last if last and all(torch.equal(*each) for each in zip(now, last)) else now


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Keep a chunk's saved tensors out of the caller's hooks, and allow forward mode.

    Hooks from outside (activation checkpointing, offloading) are for what waits for backward; a
    chunk's own graph is gone by then. Where there are no hooks, none are installed, since
    torch.func, which head or loss_fn may use, does not allow them. An autograd.Function switches
    forward mode off, which they may use as well.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        if _top_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        yield


def is_ours() -> bool:
    """Return True unless head or loss_fn installed hooks, a transform or forward mode."""
    hooks = _top_hooks()
    transformed = torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0
    return not transformed and (hooks is None or hooks[0] is _pack)


def _top_hooks() -> Any:
    """Return the innermost hooks of saved tensors, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    """Save a tensor as it is, with its version."""
    # Detached: an output that held itself through its graph would live until garbage is collected.
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; raise if it was changed in place."""
    tensor, version = packed
    if tensor._version != version:  # autograd's own check is off under hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)}, in head or loss_fn"
        )
    return tensor
