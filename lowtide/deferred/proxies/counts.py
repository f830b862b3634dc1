"""Report what happens to deferred logits: counts, and warnings.

In compiled code an operator counts whenever it runs. A replayed CUDA graph runs no operator.
"""

import functools
import itertools
import sys
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import register_autograd, register_fake
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

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


class HeadNotCalledWarning(UserWarning):
    """Warns that a model is trained without calls of its deferred head.

    Two steps have gone by without a call, or the head is no longer a module of the model.
    """


class Watch:
    """Warn once if an optimizer steps twice and the head has not been called with gradients.

    Warn also if the head is no longer a module of the model, at the first step after it.

    A step counts if the optimizer holds a parameter of the head or, for a frozen head, any
    parameter of the model. Calls of the head count from the start of the deferral.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.called, self.steps = False, 0
        self.model, self.head, self.name = weakref.ref(model), weakref.ref(head), type(head).__name__
        self.path = _path(model, head)
        _listen()
        _watches.add(self)

    def end(self) -> None:
        _watches.discard(self)

    def stepped(self, optimizer: Optimizer) -> None:
        model, head = self.model(), self.head()
        if model is None:
            self.end()
        elif not self._is_head_of(model, head):
            self._replaced(model, optimizer)
        elif head is not None and not self.called:
            self._not_called(model, head, optimizer)

    def _is_head_of(self, model: nn.Module, head: nn.Module | None) -> bool:
        if head is None:
            return False
        found: Any = model
        for name in self.path or ():
            found = getattr(found, name, None)
        if found is not head:  # Another module may have been put around the head since.
            self.path = _path(model, head)
        return self.path is not None

    def _replaced(self, model: nn.Module, optimizer: Optimizer) -> None:
        if not _trains(optimizer, model.parameters()):
            return
        self.end()
        # Nothing is lost if the new head is deferred as well.
        if any(hasattr(type(each), "lowtide_deferral") for each in model.modules()):
            return
        warnings.warn(
            f"the deferred head ({self.name}) is no longer a module of the model: another has taken its "
            "place since defer_logits (by resize_token_embeddings?), whose logits are real. undo() the "
            "deferral before such a change, and call defer_logits after it",
            HeadNotCalledWarning,
            stacklevel=user_stacklevel(),
        )

    def _not_called(self, model: nn.Module, head: nn.Module, optimizer: Optimizer) -> None:
        # If the head is frozen, any step of the model counts.
        own = [each for each in head.parameters() if each.requires_grad] or list(model.parameters())
        self.steps += _trains(optimizer, own)
        if self.steps < 2:  # The first step may only create the optimizer's state.
            return
        self.end()
        warnings.warn(
            f"the deferred head ({self.name}) has not been called in training mode since defer_logits, and "
            "an optimizer has stepped twice: the loss of this model is not made of what its head returns, "
            "and nothing is saved. Code that multiplies by the head's weight itself can call "
            "lowtide.linear_cross_entropy; trainers of TRL have "
            "lowtide.integrations.trl.TRLDeferralCallback; if another module makes the logits, pass it as "
            "head=",
            HeadNotCalledWarning,
            stacklevel=user_stacklevel(),
        )


def _trains(optimizer: Optimizer, parameters: Iterable[Tensor]) -> bool:
    """Return whether the optimizer holds one of the parameters."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return any(id(each) in trained for each in parameters)


def _path(model: nn.Module, head: nn.Module) -> list[str] | None:
    """Return the attributes that lead from the model to the head, or None if none do."""
    paths = (name for name, each in model.named_modules() if each is head)
    return next((path.split(".") if path else [] for path in paths), None)


_watches: set[Watch] = set()  # Those of models that are gone end at the next step.


@functools.cache
def _listen() -> None:
    """Register one hook for all watches, and keep it.

    A hook that is removed while it runs would change the dict that torch iterates over.
    """

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watch in list(_watches):
            watch.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)


def user_stacklevel() -> int:
    """Return the stacklevel that names the nearest caller outside lowtide and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("lowtide", "torch"):
        level, frame = level + 1, frame.f_back
    return level
