"""Restore random states and autocast settings when a chunk is computed again."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lowtide.core import torch_private


class Replay:
    """Hold the generators' states at the start of each chunk, and the call's autocast settings."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self.devices = sorted((each for each in devices if each.type not in ("cpu", "meta")), key=str)
        self.on_cuda = any(device.type == "cuda" for device in devices)
        self.kinds = sorted({"cpu", *(device.type for device in devices if device.type != "meta")})
        self.casts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in self.kinds
        ]
        self.cached = torch.is_autocast_cache_enabled()
        self.states: dict[int, tuple[Tensor, ...]] = {}

    @contextlib.contextmanager
    def autocast(self, *, on: bool = True) -> Iterator[None]:
        """Restore the call's autocast settings, or switch autocast off if not `on`.

        A chunk's backward runs with autocast off: its operators have the dtypes of forward.
        """
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.casts:
                if on or enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, on and enabled, self.cached))
            yield

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """Restore the generators' states when the block ends."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices=[]))  # the CPU's generator alone
            for device in self.devices:
                stack.enter_context(torch.random.fork_rng(devices=[device], device_type=device.type))
            yield

    @contextlib.contextmanager
    def chunk(self, place: int) -> Iterator[None]:
        """Let a chunk draw the same random numbers each time it is computed.

        The first time, keep the generators' states. Later, start from the kept states, and restore
        those from before when the block ends.
        """
        if place not in self.states:
            if not (self.on_cuda and torch.cuda.is_current_stream_capturing()):
                self.states[place] = self._state(self.states.get(place - 1))
            yield
            return
        with self.forked():
            cpu, *others = self.states[place]
            torch.set_rng_state(cpu)
            for device, state in zip(self.devices, others):
                torch.get_device_module(device).set_rng_state(state, device)
            yield

    def drew(self) -> bool:
        """Return True if random numbers were drawn since the first chunk began."""
        first = self.states.get(0)
        return first is not None and self._state(first) is not first

    def _state(self, last: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """Return the generators' states (5 KB), or `last` itself if it equals them."""
        others = (torch.get_device_module(device).get_rng_state(device) for device in self.devices)
        now = (torch.get_rng_state(), *others)
        # These are real tensors, which torch.equal refuses under a mode of fake tensors.
        with torch_private.without_modes() if torch_private.dispatch_modes() else contextlib.nullcontext():
            return last if last and all(torch.equal(*each) for each in zip(now, last)) else now
