"""Count losses without logits and materialised logits, and warn of the latter.

In compiled code an operator counts whenever it runs. A replayed CUDA graph runs no operator.
"""

import itertools
import sys
import warnings
import weakref

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake

from lowtide.core.operator import operator

# The event of a loss without logits, or of what one is made of; others are names of operations.
FUSED_LOSS = ""


class RealLogitsWarning(UserWarning):
    """Warns that an operation has materialised deferred logits."""


class _Held:
    """Live as long as the graph of a loss that holds the head's gradient."""


class Counts:
    """Count one head's losses without logits, and the operations that materialised logits."""

    def __init__(self) -> None:
        self.fused = 0
        self.materialized: dict[str, int] = {}
        self._held: weakref.WeakSet[_Held] = weakref.WeakSet()
        self.number = next(_numbers)
        _by_number[self.number] = self

    def add(self, event: str) -> None:
        """Count `FUSED_LOSS` or an operation; warn the first time an operation occurs."""
        if event == FUSED_LOSS:
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

    @property
    def holds_gradient(self) -> bool:
        """Return True while a loss lives that holds the head's gradient, formed in forward."""
        return len(self._held) > 0

    def hold(self, loss: Tensor) -> None:
        """Note that this loss holds the head's gradient, until its backward or its graph's end."""
        if loss.grad_fn is None:
            return
        held = [_Held()]
        self._held.add(held[0])
        loss.grad_fn.register_hook(lambda *_: held.clear())

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


def user_stacklevel() -> int:
    """Return the stacklevel that names the nearest caller outside lowtide and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("lowtide", "torch"):
        level, frame = level + 1, frame.f_back
    return level
