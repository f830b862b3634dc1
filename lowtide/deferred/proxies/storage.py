"""Define what logits share that would be views of the same memory as real tensors."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.deferred.proxies.head_call import HeadCall


class View(NamedTuple):
    """Hold the call of a tensor's method that returns a view."""

    name: str
    arguments: tuple[Any, ...]
    grad: bool
    """True if gradients were on; torch refuses some changes of views that were made without."""

    def of(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad):
            view: Tensor = getattr(tensor, self.name)(*self.arguments)
            return view


class Storage:
    """Hold what all logits share that would be views of the same memory as real tensors."""

    def __init__(self, node: Any, meta: Tensor, head_call: HeadCall, class_dim: int) -> None:
        self.whole = (node, meta, head_call, class_dim)
        """Defines the whole logits, which the others are views of."""
        self.made = 0
        """Counts those of these logits that have been materialised, each by itself."""
        self.changed: str | None = None
        """The operation that changed materialised logits in place, if any."""
        self.tensor: Tensor | None = None
        """The whole logits, once a change of them or of a view has been recorded."""
        self.before: Storage | None = None
        """That of the same logits before an autograd.Function returned them, if one has."""
        self.traced = False
        """True if torch.compile traced any of these logits, which `living` does not have."""
        self.living: weakref.WeakValueDictionary[int, Any] | None = None
        """Those of these logits that code can still use; None if the head was traced."""
        if not torch.compiler.is_compiling():
            self.living = weakref.WeakValueDictionary()

    def add(self, logits: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        elif self.living is not None:
            self.living[id(logits)] = logits

    def notice(self) -> None:
        """Record a change that real logits took as a tensor, without a call of these logits."""
        if self.changed is not None or self.made == 0 or torch.compiler.is_compiling():
            return
        for each in () if self.living is None else list(self.living.values()):
            if each.version is not None and each.version != each.made._version:
                self.changed = "a method of the real logits, or of a view of them"
                if each.path == ():
                    self.tensor = each.made
