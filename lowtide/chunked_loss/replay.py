"""What a chunk depends on besides its tensors, kept so that it can be computed again: the state of the random
number generators at its start, and autocast."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class Replay:
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

    def _state(self, last: tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
        """The last one again if nothing random has happened since: they are 5 KB each."""
        now = (torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self.cuda))
        return last if last and all(torch.equal(*each) for each in zip(now, last)) else now


def ours() -> torch.autograd.graph.saved_tensors_hooks:
    """Within, saved tensors are held as they are. Hooks from outside (activation checkpointing, offloading)
    are for what waits for backward; a chunk's own graph is gone before."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def is_ours() -> bool:
    """Whether nobody has put hooks of their own on top."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0] is _pack


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
