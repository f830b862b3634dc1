"""Count the steps of optimizers over the memory that logits are made of, as changes in place.

Fused optimizers, and those that write to `.data`, leave the version counters of the parameters as
they are.
"""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.core.collectives import part_of_rank


class Memory:
    """Identify a tensor's memory; logits, and their autograd graph, keep this object."""

    def __init__(self, tensor: Tensor) -> None:
        self.address = _address(tensor)
        _used[id(self)] = self
        _listen()


_used: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()


@functools.cache
def _listen() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise the version counters of stepped parameters that logits are made of."""
    if torch.compiler.is_compiling():
        return
    # Another thread may add to these, which does not disturb a list of references.
    used = {memory.address for memory in (ref() for ref in _used.valuerefs()) if memory is not None}
    used.discard(None)
    if not used:
        return
    for group in optimizer.param_groups:
        for each in group["params"]:
            if each.grad is not None and _address(each) in used:
                increment_version(each)


def _address(tensor: Tensor) -> int | None:
    own = part_of_rank(tensor)
    return int(own.untyped_storage()._cdata) if own.layout == torch.strided else None
