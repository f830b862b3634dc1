"""Keep a chunk's graph away from the caller's saved-tensor hooks, and find active transforms."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Keep a chunk's saved tensors away from the caller's hooks, and allow forward mode.

    The caller's hooks (activation checkpointing, offloading) are meant for tensors that wait for
    the caller's backward. A chunk's own graph is freed before that. If the caller has no hooks,
    install none: torch.func does not allow hooks, and head or loss_fn may use torch.func. They may
    also use forward mode, so switch it on: torch switches it off inside an autograd.Function.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_ad._set_fwd_grad_enabled(True))
        if torch_private.top_saved_tensors_hooks(True) is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(_pack, _unpack))
        yield


def is_isolated() -> bool:
    """Return True unless head or loss_fn installed hooks, a transform or forward mode."""
    hooks = torch_private.top_saved_tensors_hooks(True)
    return not any_transform() and (hooks is None or hooks[0] is _pack)


def any_transform() -> bool:
    """Return True if a transform of torch.func or forward mode is active."""
    return torch_private.current_level() is not None or forward_ad._current_level >= 0


def _pack(tensor: Tensor) -> tuple[Tensor, int]:
    """Save a tensor without copying its memory, and its version."""
    # Detach it: an output that is saved for its own node would hold itself through its graph, and
    # would live until Python's garbage collector runs.
    return tensor.detach(), tensor._version


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor; raise if it was changed in place."""
    tensor, version = packed
    if tensor._version != version:  # autograd does not check versions under hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)}, in head or loss_fn"
        )
    return tensor
