"""Define `DeferredLogits`, which stand for logits until an operation needs real ones."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.deferred import expression, frames
from lowtide.deferred.counting import Counts
from lowtide.deferred.expression import Node
from lowtide.deferred.proxy import (
    BINARY,
    IN_PLACE,
    OTHERS,
    REFLECTED,
    add_operators,
    flat,
    is_in_place,
    is_torchs,
    replaced,
    spelled,
)

# A meta tensor of the same shape, dtype and strides answers these.
METADATA = {
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "itemsize", "layout"),
    *("nbytes", "ndim", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
}

Handler = tuple[Callable[..., Any], frozenset[str] | None]
HANDLERS: dict[str, Handler] = {}
"""Map the name of a torch function to its handler and the keywords that this accepts.

elementwise.py, indexing.py and reductions.py fill it.
"""


def handles(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the function in place of torch's functions and methods of these names.

    The function returns NotImplemented where it does not apply; then the logits are materialised.
    """

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
NO_READER = (
    "a reader of arrays (torch.as_tensor, torch.tensor, DLPack) would take these logits without their "
    "gradient; pass logits.materialize(), or logits.detach()"
)


class Source:
    """Hold what all logits of one call of the head share."""

    def __init__(self, counts: Counts, workspace: int | None) -> None:
        self.counts = counts
        self.workspace = workspace
        """Bytes that each fused loss may hold; None for the default."""
        self.made = 0
        """How many of them are real."""
        self.changed: str | None = None
        """The operation that changed real ones in place."""
        self.function = frames.enclosing_function()
        """The frame of the autograd.Function that made them in its forward, without a gradient."""


@dataclasses.dataclass(init=False, repr=False, eq=False)
class DeferredLogits:
    """Stand for the tensor that the head would have returned.

    They know their shape, dtype and device, and record what is done with them. They reduce to a
    number (a loss) or a number a row without ever being a tensor. Any other operation materialises
    the tensor, once, exactly as the model's code would have.

    This is not a subclass of Tensor: code that clones or wraps a module's outputs would materialise
    one.
    """

    # A dataclass, because DistributedDataParallel searches these for the tensors that a forward's
    # outputs depend on, and FSDP1 attaches its work before backward to the tensors that it finds in
    # one.
    node: Node
    meta: Tensor
    source: Source
    class_dim: int

    __array_priority__ = 1000  # NumPy leaves `number * logits` to this class.

    def __init__(self, node: Node, meta: Tensor, source: Source, class_dim: int) -> None:
        if not torch.is_grad_enabled() and expression.requires_grad(node):
            node = expression.Apply("detach", (node,), None, node.dtype)
        self.node, self.meta, self.source, self.class_dim = node, meta, source, class_dim
        self.tensor: Tensor | None = None
        self.one_of_several = False
        """True for one of several views by one torch call, which torch refuses to change."""

    @property
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return expression.device(self.node)

    @property
    def requires_grad(self) -> bool:
        return expression.requires_grad(self.node) if self.tensor is None else self.tensor.requires_grad

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Any) -> None:
        raise RuntimeError("the data of deferred logits cannot be exchanged; take logits.materialize() first")

    @property
    def grad(self) -> Any:
        raise RuntimeError(f"grad: {NO_GRADIENT}")

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

    def like(self, node: Node, meta: Tensor, class_dim: int | None = None) -> "DeferredLogits":
        return DeferredLogits(node, meta, self.source, self.class_dim if class_dim is None else class_dim)

    def check_function(self) -> None:
        """Raise an error if these have left an autograd.Function, which gave them no gradient."""
        function = self.source.function
        if function is not None and not frames.is_at_work(function):
            raise RuntimeError(
                f"these logits have left {function.f_locals['cls'].__name__}, an autograd.Function, without "
                "their gradient; compute the loss in it, or undo() the deferral (of torch.utils.checkpoint "
                "take the other kind, use_reentrant=False)"
            )

    def checked(self) -> Node:
        """Return the node; raise an error if its tensors have changed since it was recorded."""
        self.check_function()
        if self.source.changed is not None:
            raise RuntimeError(
                f"the logits were changed in place ({self.source.changed}), and others of the same call of "
                "the head are used after it; use what the operation returned, its form that is not in place, "
                "or undo() the deferral"
            )
        expression.check(self.node)
        return self.node

    def real(self, operation: str) -> Tensor:
        """Return the tensor, materialised if need be; `operation` names what needs it."""
        self.check_function()
        if self.tensor is None:
            node = self._counted(self.checked(), operation)
            # Gradients are on, and the tree detaches where there are none: a view made without
            # gradients could not be changed in place where they are on.
            with torch.inference_mode(False), torch.enable_grad():
                tensor = expression.run(node).reshape(*self.rows, self.classes).movedim(-1, self.class_dim)
                self.tensor = _laid_like(self.meta, tensor)
            self.source.made += 1
        return self.tensor

    def _counted(self, node: Node, operation: str) -> Node:
        """Count on the hidden states: a compiled graph copies the tensor, and they are small."""
        first = True

        def count(x: Tensor) -> Tensor:
            nonlocal first
            if first:
                x = self.source.counts.on(x, operation)
            first = False
            return x

        return expression.changed(node, rows=count)

    def materialize(self) -> Tensor:
        """Return the tensor, for code that accepts only a tensor."""
        return self.real("materialize")

    def about_to_change(self, operation: str) -> None:
        """Record an in-place change, after which other logits of this call must not be
        materialised.

        Raises:
            RuntimeError: torch refuses the change, or other logits that should change with these
                have been materialised already.
        """
        if self.one_of_several:
            raise RuntimeError(
                f"{operation} would change one of several views that were made by one call (split, chunk, "
                "unbind), which torch refuses; use its form that is not in place"
            )
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
        if name in ("retain_grad", "register_hook"):
            raise RuntimeError(f"{name}: {NO_GRADIENT}")
        if name in ("T", "mT"):
            return self.transpose(-1, -2) if name == "mT" or self.dim() == 2 else self.real("Tensor.T").T
        method = getattr(Tensor, name)
        if callable(method):
            return functools.partial(_call_method, method, self)
        return getattr(self.real(spelled(name)), name)

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

    def __dlpack__(self, **options: Any) -> Any:
        if self.requires_grad:
            raise RuntimeError(NO_READER)
        return self.real("DLPack").__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        if self.requires_grad:
            raise RuntimeError(NO_READER)
        return self.real("DLPack").__dlpack_device__()

    def __deepcopy__(self, memo: Any) -> "DeferredLogits":
        return self.detach()

    __hash__ = object.__hash__


def _laid_like(meta: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the strides of `meta`; they decide whether a reshape is a view."""
    strides = zip(meta.shape, meta.stride(), tensor.stride())
    if all(wanted == found for size, wanted, found in strides if size > 1):
        return tensor
    laid = torch.empty_strided(meta.shape, meta.stride(), dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a torch function some of whose arguments are deferred logits."""
    name = getattr(function, "__name__", str(function))
    handler, keywords = HANDLERS.get(name, (None, None))
    deferred = [each for each in flat((args, kwargs)) if isinstance(each, DeferredLogits)]
    _check_gradients(deferred)
    known = "out" not in kwargs and (keywords is None or keywords >= kwargs.keys())
    # Logits without classes take no memory; torch handles them.
    if handler is not None and known and all(each.tensor is None and each.classes for each in deferred):
        result = handler(*args, **kwargs) if is_torchs(function, name) else NotImplemented
        if result is not NotImplemented:
            return result
    if name in METADATA and isinstance(args[0], DeferredLogits):
        return function(args[0].meta, *args[1:], **kwargs)
    operation = spelled(name)
    # torch refuses detach_ of views, and whether real logits are one is chance.
    if name == "detach_":
        raise RuntimeError(f"{operation} would detach deferred logits in place; use detach()")
    target = kwargs.get("out", args[0] if args and is_in_place(name) else None)
    args, kwargs = replaced((tuple(args), kwargs), DeferredLogits, lambda each: each.real(operation))
    if isinstance(target, DeferredLogits):
        target.about_to_change(operation)
    return function(*args, **kwargs)


def _check_gradients(deferred: list[DeferredLogits]) -> None:
    """Raise an error within an autograd.Function that was given them.

    Such a Function computes no gradient for an argument that is not a tensor.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return
    sources = {id(each.source) for each in deferred if each.requires_grad}
    if not sources:
        return
    for function, args in frames.functions_of_arguments():
        for each in args:
            given = getattr(each, "logits", each) if isinstance(each, Tensor) else each
            if isinstance(given, DeferredLogits) and id(given.source) in sources:
                raise RuntimeError(
                    f"{function.__name__}, an autograd.Function, was given deferred logits, "
                    "and would lose their gradient; pass logits.materialize(), or undo() the deferral"
                )


def _call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(method, args, kwargs)


add_operators(DeferredLogits, (*BINARY, *REFLECTED, *IN_PLACE, *OTHERS), call)
