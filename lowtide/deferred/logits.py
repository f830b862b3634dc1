"""Logits that are not there until somebody insists."""

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from lowtide.deferred import tree
from lowtide.deferred.tree import Node

# What a tensor on the meta device, of the same shape, dtype and strides, can tell.
METADATA = {
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "itemsize", "layout"),
    *("nbytes", "ndim", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
}
# Operators, which Python looks up on the type. torch calls them by these names, too.
BINARY = [
    "add",
    "and",
    "floordiv",
    "lshift",
    "matmul",
    "mod",
    "mul",
    "or",
    "pow",
    "rshift",
    "sub",
    "truediv",
    "xor",
]
REFLECTED = [f"r{name}" for name in BINARY]
IN_PLACE = ["setitem", *(f"i{name}" for name in BINARY)]
OTHERS = [
    *("abs", "bool", "complex", "contains", "eq", "float", "ge", "gt", "index", "int", "invert", "le", "lt"),
    *("ne", "neg", "pos"),
]

Handler = tuple[Callable[..., Any], frozenset[str] | None]
HANDLERS: dict[str, Handler] = {}
"""By the name of the torch function, with the keywords that it knows: elementwise.py, rows.py and
functions.py fill it."""


def handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The function runs in place of torch's functions and methods of these names, unless it returns
    NotImplemented."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(handler).parameters.values()
        anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
        keywords = None if anything else frozenset(each.name for each in parameters)
        HANDLERS.update(dict.fromkeys(names, (handler, keywords)))
        return handler

    return register


NO_GRADIENT = (
    "the loss does not go through these logits, so they have no gradient; undo() the deferral to look at it"
)


class Source:
    """What all logits of one call of the head have in common."""

    def __init__(self, report: Callable[[str], None], fused: Callable[[], None]) -> None:
        self.report, self.fused = report, fused
        self.made = 0
        """How many of them are real."""
        self.changed: str | None = None
        """The operation that has changed real ones in place."""


@dataclasses.dataclass(init=False, repr=False, eq=False)
class DeferredLogits:
    """Stands for the tensor that the head would have returned. It knows its shape, dtype and device, records
    what is done with it, and becomes a number (a loss) or a number a row without ever being a tensor.
    Whatever else is asked of it makes the tensor, once, exactly as the model's code would have.

    Not a subclass of Tensor: those are made real by whoever clones or wraps a module's outputs.
    """

    # A dataclass, as DistributedDataParallel looks into those for what a forward's outputs depend on; FSDP1
    # hangs its work before backward on the tensors that it finds in one.
    node: Node
    meta: Tensor
    source: Source
    class_dim: int

    def __init__(self, node: Node, meta: Tensor, source: Source, class_dim: int) -> None:
        if not torch.is_grad_enabled() and tree.requires_grad(node):
            node = tree.Apply("detach", (node,), None)
        self.node, self.meta, self.source, self.class_dim = node, meta, source, class_dim
        self.tensor: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return tree.first(self.node).input.device

    @property
    def requires_grad(self) -> bool:
        return tree.requires_grad(self.node) if self.tensor is None else self.tensor.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def classes(self) -> int:
        return self.meta.shape[self.class_dim]

    @property
    def rows(self) -> torch.Size:
        """The shape without the classes."""
        return torch.Size((*self.shape[: self.class_dim], *self.shape[self.class_dim + 1 :]))

    @property
    def classes_last(self) -> bool:
        return self.class_dim == self.meta.dim() - 1

    def like(self, node: Node, meta: Tensor, class_dim: int | None = None) -> "DeferredLogits":
        return DeferredLogits(node, meta, self.source, self.class_dim if class_dim is None else class_dim)

    def checked(self) -> Node:
        """The node, if what it stands for is still what it was when it was recorded."""
        if self.source.changed is not None:
            raise RuntimeError(
                f"the logits were changed in place ({self.source.changed}), and others of the same call of "
                "the head are used after it; use what the operation returned, its form that is not in place, "
                "or undo() the deferral"
            )
        tree.check(self.node)
        return self.node

    def real(self, operation: str) -> Tensor:
        """The tensor; `operation` is what needs it."""
        if self.tensor is None:
            node = self.checked()
            with torch.inference_mode(False), torch.set_grad_enabled(tree.requires_grad(node)):
                tensor = tree.run(node).reshape(*self.rows, self.classes).movedim(-1, self.class_dim)
                self.tensor = tensor.contiguous() if self.meta.is_contiguous() else tensor
            self.source.made += 1
            self.source.report(operation)
        return self.tensor

    def materialize(self) -> Tensor:
        """The tensor, for code that takes no other thing."""
        return self.real("materialize")

    def about_to_change(self, operation: str) -> None:
        """In place: no other logits may have been made that should change with these, and none may be made
        later as if these had not."""
        if self.source.made > 1:
            raise RuntimeError(
                f"{operation} would change logits of which other forms have been made already; use its form "
                "that is not in place, or undo() the deferral"
            )
        self.source.changed = operation

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__" or not hasattr(Tensor, name):
            raise AttributeError(f"{name!r}: not an attribute of a tensor")
        if name in METADATA and self.tensor is None:
            return getattr(self.meta, name)
        if name in ("grad", "retain_grad", "register_hook"):
            raise RuntimeError(f"{name}: {NO_GRADIENT}")
        if name in ("T", "mT"):
            return self.transpose(-1, -2) if name == "mT" or self.dim() == 2 else self.real("Tensor.T").T
        if name == "data":
            return self.detach()
        method = getattr(Tensor, name)
        if callable(method):
            return functools.partial(_call_method, method, self)
        return getattr(self.real(_spelled(name)), name)

    def __getitem__(self, index: Any) -> Any:
        return call(Tensor.__getitem__, (self, index), {})

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Any:
        return iter([self[row] for row in range(len(self))])

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real("a copy or a pickle").__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None) -> Any:
        return self.real("numpy").__array__(dtype)

    def __deepcopy__(self, memo: Any) -> "DeferredLogits":
        return self.detach()

    __hash__ = object.__hash__


def _flatten(logits: DeferredLogits) -> tuple[list[Tensor], DeferredLogits]:
    return [each.input for each in tree.linears(logits.node)], logits


def _unflatten(leaves: Iterable[Any], logits: DeferredLogits) -> Any:
    """What has been done to the hidden states was meant for the logits."""
    new, old = list(leaves), _flatten(logits)[0]
    if all(one is other for one, other in zip(new, old)):
        return logits
    if not all(isinstance(each, Tensor) for each in new):
        return tuple(new)
    if logits.requires_grad and not any(each.requires_grad for each in new):
        return logits.detach()
    if new[0].dtype != old[0].dtype:
        return logits.to(new[0].dtype)
    inputs = iter(new)
    return logits.like(tree.changed(logits.node, rows=lambda _: next(inputs)), logits.meta)


# FSDP2 hangs its work before backward on the tensors that it finds so in a module's outputs.
register_pytree_node(DeferredLogits, _flatten, _unflatten)


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A torch function some of whose arguments are deferred logits."""
    name = getattr(function, "__name__", str(function))
    handler, keywords = HANDLERS.get(name, (None, None))
    deferred = [each for each in _flat((args, kwargs)) if isinstance(each, DeferredLogits)]
    _check_gradients(deferred)
    known = "out" not in kwargs and (keywords is None or keywords >= kwargs.keys())
    if handler is not None and known and all(each.tensor is None for each in deferred):
        result = handler(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if name in METADATA and isinstance(args[0], DeferredLogits):
        return function(args[0].meta, *args[1:], **kwargs)
    operation = _spelled(name)
    target = kwargs.get("out", args[0] if args and _in_place(name) else None)
    args, kwargs = _made_real(args, operation), _made_real(kwargs, operation)
    if isinstance(target, DeferredLogits):
        target.about_to_change(operation)
    return function(*args, **kwargs)


def _check_gradients(deferred: list[DeferredLogits]) -> None:
    """Within an autograd.Function that was given them: it takes no gradient for what is no tensor."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return
    sources = {id(each.source) for each in deferred if each.requires_grad}
    frame = sys._getframe(1) if sources else None
    while frame is not None:
        if frame.f_code is torch.autograd.Function.apply.__func__.__code__:  # type: ignore[attr-defined]
            for each in frame.f_locals.get("args", ()):
                if isinstance(each, DeferredLogits) and id(each.source) in sources:
                    raise RuntimeError(
                        f"{frame.f_locals['cls'].__name__}, an autograd.Function, was given deferred logits, "
                        "and would lose their gradient; pass logits.materialize(), or undo() the deferral"
                    )
        frame = frame.f_back


def _spelled(name: str) -> str:
    places = {"torch": torch, "torch.nn.functional": torch.nn.functional}
    found = (f"{at}.{name}" for at, owner in places.items() if hasattr(owner, name))
    return f"Tensor.{name}" if name[:2] == "__" else next(found, f"Tensor.{name}")


def _call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(method, args, kwargs)


def _operator(name: str) -> Callable[..., Any]:
    def operator(*args: Any) -> Any:
        return call(getattr(Tensor, name), args, {})

    return operator


for _name in (*BINARY, *REFLECTED, *IN_PLACE, *OTHERS):
    if hasattr(Tensor, f"__{_name}__"):
        setattr(DeferredLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _in_place(name: str) -> bool:
    """mul_, __imul__, __setitem__, ..."""
    return name[2:-2] in IN_PLACE if name[:2] == "__" else name[-1] == "_"


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in _flat(each)] if isinstance(value, (list, tuple)) else [value]


def _made_real(value: Any, operation: str) -> Any:
    if isinstance(value, DeferredLogits):
        return value.real(operation)
    if isinstance(value, dict):
        return {key: _made_real(each, operation) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_made_real(each, operation) for each in value)
    return value


def user_stacklevel() -> int:
    """For a warning: the nearest caller that is neither lowtide nor torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("lowtide", "torch"):
        level, frame = level + 1, frame.f_back
    return level
