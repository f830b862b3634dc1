"""Count what happens to deferred logits.

In compiled code an operator counts whenever it runs. A replayed CUDA graph runs no operator.
"""

import itertools
import warnings
import weakref

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from lowtide.core.operator import operator
from lowtide.deferred.frames import user_stacklevel

FUSED = ""  # Names the event that is not an operation.


class RealLogitsWarning(UserWarning):
    """Warns that an operation has materialised deferred logits."""


class Counts:
    """Count one head's losses without logits, and the operations that materialised logits."""

    def __init__(self) -> None:
        self.fused = 0
        self.materialized: dict[str, int] = {}
        self.number = next(_numbers)
        _by_number[self.number] = self

    def add(self, event: str) -> None:
        """Count a loss (`FUSED`) or a materialising operation, and warn of the latter's first."""
        if event == FUSED:
            self.fused += 1
            return
        self.materialized[event] = self.materialized.get(event, 0) + 1
        if self.materialized[event] == 1:
            warnings.warn(
                f"{event} needs real logits: they are made, exactly, in the memory that they take. "
                "What needs none: help(lowtide.defer_logits). If real ones are wanted here, call the head in "
                "eval mode for them (head.eval(), then head.train()), or undo() the deferral",
                RealLogitsWarning,
                stacklevel=user_stacklevel(),
            )

    def on(self, tensor: Tensor, event: str) -> Tensor:
        """Return the tensor and count the event: now, or whenever a compiled graph runs."""
        if not torch.compiler.is_compiling():
            self.add(event)
            return tensor
        return _counted(tensor, self.number, event)


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Counts] = weakref.WeakValueDictionary()


@operator("counted", "(Tensor x, int number, str event) -> Tensor")
def _counted(x: Tensor, number: int, event: str) -> Tensor:
    counts = _by_number.get(number)
    if counts is not None:
        counts.add(event)
    return x.clone()


@register_fake("lowtide::counted")
def _(x: Tensor, number: int, event: str) -> Tensor:
    return torch.empty_like(x)


register_autograd("lowtide::counted", lambda ctx, gradient: (gradient, None, None))
