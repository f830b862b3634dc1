"""Warn if training never calls the deferred head."""

import functools
import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.deferred.frames import user_stacklevel


class HeadNotCalledWarning(UserWarning):
    """Warns that a model has been trained for two steps without a call of its deferred head."""


class Watch:
    """Warn once if an optimizer steps twice and the head has not been called with gradients.

    Only steps over the head's parameters count; if it is frozen, steps over any of the model's.
    Calls count from the start of the deferral.
    """

    def __init__(self, model: nn.Module, head: nn.Module) -> None:
        self.called, self.steps = False, 0
        self.model, self.head, self.name = weakref.ref(model), weakref.ref(head), type(head).__name__
        _listen()
        _watches.add(self)

    def end(self) -> None:
        """Stop watching."""
        _watches.discard(self)

    def stepped(self, optimizer: Optimizer) -> None:
        """Count an optimizer's step."""
        model, head = self.model(), self.head()
        if self.called or model is None or head is None:
            return self.end()
        trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
        # If the head is frozen, any step of the model counts.
        own = [each for each in head.parameters() if each.requires_grad] or list(model.parameters())
        self.steps += any(id(each) in trained for each in own)
        if self.steps < 2:  # The first step may only create the optimizer's state.
            return None
        self.end()
        return warnings.warn(
            f"the deferred head ({self.name}) has not been called in training mode since defer_logits, and "
            "an optimizer has stepped twice: the loss of this model is not made of what its head returns, "
            "and nothing is saved. Code that multiplies by the head's weight itself can call "
            "lowtide.linear_cross_entropy; trainers of TRL have "
            "lowtide.integrations.trl.TRLDeferralCallback; if another module makes the logits, pass it as "
            "head=",
            HeadNotCalledWarning,
            stacklevel=user_stacklevel(),
        )


_watches: weakref.WeakSet[Watch] = weakref.WeakSet()


@functools.cache
def _listen() -> None:
    """Register one hook for all watches, and keep it.

    A hook that is removed while it runs would change the dict that torch iterates over.
    """

    def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for watch in list(_watches):
            watch.stepped(optimizer)

    register_optimizer_step_post_hook(stepped)
