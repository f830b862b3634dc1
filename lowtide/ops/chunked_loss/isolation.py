"""Keep the graph of a chunk apart from what the caller has set up around the call."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Keep a chunk's saved tensors out of the caller's hooks, and allow forward mode.

    Hooks from outside (activation checkpointing, offloading) are for what waits for backward; a
    chunk's own graph is gone by then. Where there are no hooks, none are installed, since
    torch.func, which head or loss_fn may use, does not allow them. They may use forward mode as
    well, which an autograd.Function switches off.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        if _top_hooks() is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        yield


def is_isolated() -> bool:
    """Return True unless head or loss_fn installed hooks, a transform or forward mode."""
    hooks = _top_hooks()
    return not any_transform() and (hooks is None or hooks[0] is _pack)


def any_transform() -> bool:
    """Return True if a transform of torch.func or forward mode is at work."""
    return torch_private.current_level() is not None or forward_ad._current_level >= 0


def _top_hooks() -> Any:
    return torch_private.top_saved_tensors_hooks(True)


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
