"""Define what deferred logits share that, as real tensors, would be views of the same memory.

A change of one of them in place would change the others. If code can still use others, the whole
logits are materialised before the change, and all the logits become views of them.
"""

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.proxies.materialize import materialized


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
    """Hold what all logits share that, as real tensors, would be views of the same memory."""

    def __init__(self, node: Any, meta: Tensor, head_call: HeadCall, class_dim: int) -> None:
        self.definition = (node, meta, head_call, class_dim)
        """Defines the whole logits, which the others are views of."""
        self.times_made = 0
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

    @property
    def is_unshared(self) -> bool:
        """Return True if code can use one of these logits alone, and none has been a tensor."""
        alone = not self.traced and self.living is not None and len(self.living) == 1
        return alone and not (self.times_made or self.tensor is not None or self.changed or self.before)

    def notice(self) -> None:
        """Record a change that was made to the tensor of materialised logits, not through them."""
        if self.changed is not None or self.times_made == 0 or torch.compiler.is_compiling():
            return
        for each in () if self.living is None else list(self.living.values()):
            if each.version is not None and each.version != each.made._version:
                self.changed = "a method of the real logits, or of a view of them"
                if each.path == ():
                    self.tensor = each.made

    def view(self, path: tuple[View, ...]) -> Tensor | None:
        """Return the view that a path leads to, or None if no change has been recorded yet."""
        if self.tensor is None:
            return None
        return functools.reduce(lambda tensor, view: view.of(tensor), path, self.tensor)

    def check(self) -> None:
        """Raise an error if a change in place has not reached the logits that call this."""
        changed = self.changed or (None if self.before is None else self.before.changed)
        if changed is not None:
            raise RuntimeError(
                f"the logits were changed in place ({changed}), and views of them are used after it; use "
                "what the operation returned, its form that is not in place, or undo() the deferral"
            )

    def real_to_change(self, logits: Any, operation: str) -> Tensor:
        """Return the tensor of these logits, materialised if need be, and record its change.

        Raises:
            RuntimeError: torch refuses the change, or other logits that should change with these
                have been materialised already.
        """
        if logits.head_call.in_other_checkpoint:
            raise RuntimeError(
                f"{operation} would change, in a checkpoint, logits that were made outside of it; use its "
                "form that is not in place, or call the head in the checkpoint"
            )
        if logits.one_of_several:
            raise RuntimeError(
                f"{operation} would change one of several views that were made by one call (split, chunk, "
                "unbind), which torch refuses; use its form that is not in place"
            )
        if self.changed is None:
            self._make_whole(logits, operation)
        tensor: Tensor = logits.real(operation)
        if logits.path == ():
            self.tensor = tensor
        for storage in (self, self.before):
            if storage is not None:
                storage.changed = operation
        return tensor

    def _make_whole(self, logits: Any, operation: str) -> None:
        """Materialise the whole logits if code can still use others that change with these."""
        others = [] if self.living is None else list(self.living.values())
        wholes = (each.made for each in (logits, *others) if each.path == ())
        whole = next((each for each in wholes if each is not None), None)
        if self.times_made > (whole is not None or logits.made is not None):
            raise RuntimeError(
                f"{operation} would change logits of which other forms have been made already; use its form "
                "that is not in place, or undo() the deferral"
            )
        alone = not self.traced and self.living is not None and len(others) == 1
        if logits.made is None and logits.path and not alone:
            self.tensor = materialized(*self.definition, operation) if whole is None else whole
