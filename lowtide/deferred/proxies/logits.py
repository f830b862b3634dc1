"""Define `DeferredLogits`, which stand for logits until an operation needs real ones."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.deferred.proxies import searched
from lowtide.deferred.proxies.attributes import METADATA, TensorAttributes
from lowtide.deferred.proxies.autograd_functions import (
    describe_function,
    in_function,
    refusal,
    running_forwards,
)
from lowtide.deferred.proxies.handlers import HANDLERS
from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.proxies.materialize import materialized
from lowtide.deferred.proxies.proxy import flat, is_in_place, is_torchs, replaced, spelled
from lowtide.deferred.proxies.storage import Storage, View
from lowtide.deferred.recorded import expression
from lowtide.deferred.recorded.expression import Node


class DeferredLogits(TensorAttributes):
    """Stand for the tensor that the head would have returned.

    They know their shape, dtype and device, and record what is done with them. They reduce to a
    number (a loss) or a number a row without ever being a tensor. Any other operation materialises
    the tensor, once, exactly as the model's code would have.

    This is not a subclass of Tensor: code that clones or wraps a module's outputs would materialise
    such a subclass.
    """

    __dataclass_fields__ = searched.Fields()

    def __init__(self, *recorded: Any, **parts: Any) -> None:
        """Record logits, or join the parts of others, as `dataclasses.replace` does."""
        if parts:
            vars(self).update(vars(self._joined(parts["leaves"], parts["whole"].logits)))
            self.storage.add(self)
        else:
            self._record(*recorded)

    @staticmethod
    def _joined(leaves: list[Any], whole: "DeferredLogits") -> "DeferredLogits":
        joined = searched.join(leaves, whole)
        if isinstance(joined, DeferredLogits):
            return joined
        result = whole.like(whole.node, torch.empty_like(joined, device="meta"), copied=True)
        result.made, result.storage.changed = joined, "a cast of real logits"  # not to be made again
        return result

    def _record(
        self,
        node: Node,
        meta: Tensor,
        head_call: HeadCall,
        class_dim: int,
        storage: Storage | None = None,
        path: tuple[View, ...] | None = (),
    ) -> None:
        if not torch.is_grad_enabled() and expression.requires_grad(node):
            node = expression.Apply("detach", (node,), None, node.dtype)
        self.node, self.meta, self.head_call, self.class_dim = node, meta, head_call, class_dim
        self.storage = Storage(node, meta, head_call, class_dim) if storage is None else storage
        self.storage.add(self)
        self.path = path
        """The views that lead from the whole logits to these; None if they are not known."""
        self.made: Tensor | None = None
        self.version: int | None = None
        """The version counter of the tensor when it was made by itself, if it has one."""
        self.one_of_several = False
        """True for one of several views made by one torch call, and views of it; torch refuses to
        change these."""

    @property
    def tensor(self) -> Tensor | None:
        """Return the tensor if it has been materialised, alone or as a view of the whole logits."""
        self.storage.notice()
        if self.made is None and self.path is not None:
            self.made = self.storage.view(self.path)
        return self.made

    # The parts of a dataclass; see searched.

    @property
    def leaves(self) -> list[Any]:
        return searched.leaves(self)

    @property
    def operands(self) -> list[Tensor]:
        return searched.operands(self)

    @property
    def whole(self) -> searched.Whole:
        return searched.Whole(self)

    @property
    def classes(self) -> int:
        return self.meta.shape[self.class_dim]

    @property
    def rows(self) -> torch.Size:
        """Return the shape without the classes."""
        return torch.Size((*self.shape[: self.class_dim], *self.shape[self.class_dim + 1 :]))

    @property
    def classes_last(self) -> bool:
        return self.class_dim == self.meta.dim() - 1

    def like(
        self,
        node: Node,
        meta: Tensor,
        class_dim: int | None = None,
        *,
        copied: bool = False,
        view: tuple[Any, ...] = (),
    ) -> "DeferredLogits":
        """Return logits of the same head call; return self where torch returns its argument.

        `copied` is True if torch's result is no view: a change of one is none of the other.
        Otherwise `view` holds the name of the method that returns it, and its arguments.
        """
        if meta is self.meta and node is self.node:
            return self
        class_dim = self.class_dim if class_dim is None else class_dim
        if copied:
            return DeferredLogits(node, meta, self.head_call, class_dim)
        path = None
        if view and self.path is not None:
            path = (*self.path, View(view[0], view[1:], torch.is_grad_enabled()))
        result = DeferredLogits(node, meta, self.head_call, class_dim, self.storage, path)
        result.one_of_several = self.one_of_several and view[:1] != ("detach",)
        return result

    def checked(self) -> Node:
        """Return the node; raise an error if its tensors have changed since it was recorded."""
        self.head_call.check_left()
        self.storage.check()
        expression.check(self.node)
        return self.node

    def real(self, operation: str) -> Tensor:
        """Return the tensor, materialised if need be; `operation` names what needs it."""
        self.head_call.check_left()
        known = self.known
        if known is not None:
            return known
        tensor = materialized(self.checked(), self.meta, self.head_call, self.class_dim, operation)
        if not self.head_call.in_other_checkpoint:
            self.made, self.version = tensor, expression.version(tensor)
            self.storage.times_made += 1
        return tensor

    @property
    def known(self) -> Tensor | None:
        """Return the tensor if it has been materialised, but None in another checkpoint."""
        tensor = self.tensor
        if tensor is not None and self.storage.changed is None and self.head_call.in_other_checkpoint:
            return None
        return tensor

    def materialize(self) -> Tensor:
        """Return the tensor, for code that accepts only a tensor."""
        return self.real("materialize")

    def _record_change(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Record a change in place (`/=`, `mul_`) of logits that share their memory with no others.

        Without gradients torch changes the numbers, but not where their gradients go.

        Returns:
            False if the change is none that can be recorded.
        """
        handler = HANDLERS.get(name[3:-2] if name[:3] == "__i" else name[:-1])
        refused = self.one_of_several or self.head_call.in_other_checkpoint
        kept = self.requires_grad and not torch.is_grad_enabled()
        if handler is None or refused or kept or kwargs or len(args) > 2 or not self.storage.is_unshared:
            return False
        result = handler.function(*args)
        if not isinstance(result, DeferredLogits) or result.storage is self.storage:
            return False
        if (result.shape, result.dtype, result.stride()) != (self.shape, self.dtype, self.stride()):
            return False
        self.storage.changed = name  # for logits behind an autograd.Function (Storage.before)
        vars(self).update(vars(result))
        self.storage.add(self)
        return True

    @classmethod
    def call(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", str(function))
        handler = HANDLERS.get(name)
        deferred = [each for each in flat((args, kwargs)) if isinstance(each, DeferredLogits)]
        _check_gradients(deferred)
        # Logits without classes take no memory; torch handles them.
        recordable = all(each.known is None and each.classes for each in deferred)
        recordable = recordable and is_torchs(function, name)
        if (
            recordable
            and handler is not None
            and "out" not in kwargs
            and (handler.keywords is None or handler.keywords >= kwargs.keys())
            and (handler.anywhere or isinstance(args[0] if args else kwargs.get("input"), DeferredLogits))
        ):
            result = handler.function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name in METADATA and isinstance(args[0], DeferredLogits):
            return function(args[0].meta, *args[1:], **kwargs)
        operation = spelled(name)
        # torch refuses detach_ of views, and it is chance whether real logits are a view.
        if name == "detach_":
            raise RuntimeError(f"{operation} would detach deferred logits in place; use detach()")
        changes = is_in_place(name) or kwargs.get("inplace") is True
        target = kwargs.get("out", args[0] if args and changes else None)
        if isinstance(target, DeferredLogits):
            if recordable and target._record_change(name, args, kwargs):
                return target
            target.storage.real_to_change(target, operation)
        args, kwargs = replaced((tuple(args), kwargs), DeferredLogits, lambda each: each.real(operation))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"


def _check_gradients(deferred: list[DeferredLogits]) -> None:
    """Raise an error within an autograd.Function that was given logits that require a gradient.

    A Function computes no gradient for an argument that is not a tensor.
    """
    if torch.is_grad_enabled() or not in_function():
        return
    here = next(running_forwards(), None)
    if any(each.requires_grad and (here is None or each.head_call.forward is not here) for each in deferred):
        raise RuntimeError(refusal(describe_function(here)[0]))
