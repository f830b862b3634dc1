"""Warn of a model that is trained without calls of its deferred head."""

import functools
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lowtide.deferred.proxies.counts import user_stacklevel


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
