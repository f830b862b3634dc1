"""Define `DeferredLogits`, which stand for logits until an operation needs real ones."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.deferred.proxies import searched
from lowtide.deferred.proxies.autograd_functions import (
    describe_function,
    in_function,
    is_running,
    refusal,
    running_forwards,
)
from lowtide.deferred.proxies.handlers import HANDLERS, handles
from lowtide.deferred.proxies.head_call import HeadCall, running_checkpoint
from lowtide.deferred.proxies.proxy import Proxy, flat, is_in_place, is_torchs, replaced, spelled
from lowtide.deferred.proxies.storage import Storage, View
from lowtide.deferred.recorded import expression
from lowtide.deferred.recorded.expression import Node

# These are read from a meta tensor of the same shape, dtype and strides.
METADATA = {
    *("dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "itemsize", "layout"),
    *("nbytes", "ndim", "ndimension", "nelement", "numel", "size", "storage_offset", "stride"),
}


NO_GRADIENT = (
    "the loss does not go through these logits, so they have no gradient; undo() the deferral to look at it"
)
NO_READER = (
    "a reader of arrays (torch.as_tensor, torch.tensor, DLPack) would take these logits without their "
    "gradient; pass logits.materialize(), or logits.detach()"
)


class DeferredLogits(Proxy):
    """Stand for the tensor that the head would have returned.

    They know their shape, dtype and device, and record what is done with them. They reduce to a
    number (a loss) or a number a row without ever being a tensor. Any other operation materialises
    the tensor, once, exactly as the model's code would have.

    This is not a subclass of Tensor: code that clones or wraps a module's outputs would materialise
    such a subclass.
    """

    __dataclass_fields__ = searched.Fields()

    __array_priority__ = 1000  # NumPy leaves `number * logits` to this class.

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
        if self.made is None and self.storage.tensor is not None and self.path is not None:
            self.made = functools.reduce(lambda tensor, view: view.of(tensor), self.path, self.storage.tensor)
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
    def shape(self) -> torch.Size:
        return self.meta.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.meta.dtype

    @property
    def device(self) -> torch.device:
        return expression.hidden(self.node).device

    @property
    def requires_grad(self) -> bool:
        return expression.requires_grad(self.node) if self.tensor is None else self.tensor.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    @property
    def _leaf(self) -> Tensor | None:
        """Return the tensor of detached logits that have been made to require a gradient."""
        is_leaf = self.tensor is not None and self.tensor.requires_grad and self.tensor.is_leaf
        return self.tensor if is_leaf else None

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
        if self._leaf is None:
            raise RuntimeError(f"grad: {NO_GRADIENT}")
        return self._leaf.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self._leaf is None:
            raise RuntimeError(f"grad: {NO_GRADIENT}")
        self._leaf.grad = value

    # The hooks of tensor parallelism read these from a DTensor; deferred logits have the classes of
    # all ranks.

    @property
    def device_mesh(self) -> Any:
        return self._of_dtensor("device_mesh", self.head_call.mesh)

    @property
    def placements(self) -> Any:
        return self._of_dtensor("placements", self.head_call.placements)

    def redistribute(self, device_mesh: Any = None, placements: Any = None, **_: Any) -> "DeferredLogits":
        self._of_dtensor("redistribute", None)
        self.head_call.placements = tuple(placements)
        return self

    def full_tensor(self, **_: Any) -> "DeferredLogits":
        return self._of_dtensor("full_tensor", self)  # type: ignore[no-any-return]

    def to_local(self, **_: Any) -> "DeferredLogits":
        if not all(each.is_replicate() for each in self.placements):
            raise RuntimeError(
                "to_local() of deferred logits whose classes are divided over ranks: a loss of one rank's "
                "classes is not computed without them. Give the head the output layout Replicate(), or keep "
                "its DTensor (use_local_output=False); else undo() the deferral"
            )
        return self

    def _of_dtensor(self, name: str, value: Any) -> Any:
        if self.head_call.mesh is None:
            raise AttributeError(f"{name!r}: not an attribute of a tensor")
        return value

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

    def check_function(self) -> None:
        """Raise an error if the logits have left a Function, which gave them no gradient."""
        call = self.head_call
        if call.function is not None and torch.is_grad_enabled() and not is_running(call.left):
            raise RuntimeError(
                f"these logits have left {call.function}, without their gradient; compute the loss in "
                "it, or undo() the deferral (of torch.utils.checkpoint take the other kind, "
                "use_reentrant=False)"
            )

    def checked(self) -> Node:
        """Return the node; raise an error if its tensors have changed since it was recorded."""
        self.check_function()
        before = self.storage.before
        changed = self.storage.changed or (None if before is None else before.changed)
        if changed is not None:
            raise RuntimeError(
                f"the logits were changed in place ({changed}), and views of them are used after it; use "
                "what the operation returned, its form that is not in place, or undo() the deferral"
            )
        expression.check(self.node)
        return self.node

    def real(self, operation: str) -> Tensor:
        """Return the tensor, materialised if need be; `operation` names what needs it."""
        self.check_function()
        known = self.known
        if known is not None:
            return known
        # Let the hidden states, which are small, carry the count: a compiled graph copies the
        # tensor that carries it.
        counted = functools.partial(self.head_call.counts.on, event=operation)
        node = self.checked()
        # Turn gradients on: a view made without them could not be changed in place where they are
        # on, and the count would cut hidden states off. Where they were off, the tree has a detach
        # of its own.
        with torch.inference_mode(False), torch.enable_grad():
            node = expression.with_first_input(node, counted)
            tensor = self._evaluate(node).reshape(*self.rows, self.classes)
            tensor = _laid_like(self.meta, tensor.movedim(-1, self.class_dim))
        if not self.in_other_checkpoint:
            self.made, self.version = tensor, expression.version(tensor)
            self.storage.made += 1
        return tensor

    def _evaluate(self, node: Node) -> Tensor:
        """Return the logits by one product, or by chunks if values have been picked from chunks.

        A row's last digits depend on the number of rows in its product, and picked values have to
        be found among the logits. In another checkpoint logits are always made by chunks: values
        may be picked between its two runs, which must save the same tensors.
        """
        call = self.head_call
        if call.chunk_sizes or self.in_other_checkpoint:
            workspace = call.workspace if call.chunk_sizes else None
            return call.by_chunks(node, workspace, call.chunk_sizes)  # type: ignore[no-any-return]
        return expression.evaluate(node)

    @property
    def known(self) -> Tensor | None:
        """Return the tensor if it has been materialised, but None in another checkpoint."""
        recomputes = self.tensor is not None and self.storage.changed is None and self.in_other_checkpoint
        return None if recomputes else self.tensor

    @property
    def in_other_checkpoint(self) -> bool:
        """Return True within a checkpoint that the call of the head was not in.

        Its two runs must save the same tensors, and the logits may be materialised between the two.
        So they are materialised anew there.
        """
        checkpoint = running_checkpoint()
        return checkpoint is not None and checkpoint is not self.head_call.checkpoint

    def materialize(self) -> Tensor:
        """Return the tensor, for code that accepts only a tensor."""
        return self.real("materialize")

    def real_to_change(self, operation: str) -> Tensor:
        """Return the tensor, materialised if need be, and record its change in place.

        If code can still use other logits that change with these, the whole logits are
        materialised, and all become views of them.

        Raises:
            RuntimeError: torch refuses the change, or other logits that should change with these
                have been materialised already.
        """
        if self.in_other_checkpoint:
            raise RuntimeError(
                f"{operation} would change, in a checkpoint, logits that were made outside of it; use its "
                "form that is not in place, or call the head in the checkpoint"
            )
        if self.one_of_several:
            raise RuntimeError(
                f"{operation} would change one of several views that were made by one call (split, chunk, "
                "unbind), which torch refuses; use its form that is not in place"
            )
        storage, whole = self.storage, self._made_whole
        if storage.changed is None and storage.made > (whole is not None or self.made is not None):
            raise RuntimeError(
                f"{operation} would change logits of which other forms have been made already; use its form "
                "that is not in place, or undo() the deferral"
            )
        alone = not storage.traced and storage.living is not None and len(storage.living) == 1
        if storage.changed is None and self.made is None and self.path and not alone:
            if whole is None:
                with torch.enable_grad():  # without a detach that the whole logits have not
                    whole = DeferredLogits(*storage.whole, storage).real(operation)
            storage.tensor = whole
        tensor = self.real(operation)
        if self.path == ():
            storage.tensor = tensor
        storage.changed = operation
        if storage.before is not None:
            storage.before.changed = operation
        return tensor

    @property
    def _made_whole(self) -> Tensor | None:
        """Return the whole logits if they have been materialised and code can still use them."""
        others = () if self.storage.living is None else self.storage.living.values()
        wholes = (each.made for each in (self, *others) if each.path == ())
        return next((each for each in wholes if each is not None), None)

    def __getattr__(self, name: str) -> Any:
        if name in METADATA and self.tensor is None:
            return getattr(self.meta, name)
        if name in ("retain_grad", "register_hook") and self._leaf is None:
            raise RuntimeError(f"{name}: {NO_GRADIENT}")
        return super().__getattr__(name)

    def attribute(self, name: str) -> Any:
        if not hasattr(Tensor, name):
            raise AttributeError(f"{name!r}: not an attribute of a tensor")
        if name == "mT" or (name == "T" and self.dim() == 2):
            return self.transpose(-1, -2)
        return getattr(self.real("Tensor.T" if name == "T" else spelled(name)), name)

    @classmethod
    def call(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", str(function))
        handler = HANDLERS.get(name)
        deferred = [each for each in flat((args, kwargs)) if isinstance(each, DeferredLogits)]
        _check_gradients(deferred)
        # Logits without classes take no memory; torch handles them.
        if (
            handler is not None
            and "out" not in kwargs
            and (handler.keywords is None or handler.keywords >= kwargs.keys())
            and (handler.anywhere or isinstance(args[0] if args else kwargs.get("input"), DeferredLogits))
            and all(each.known is None and each.classes for each in deferred)
            and is_torchs(function, name)
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
            target.real_to_change(operation)
        args, kwargs = replaced((tuple(args), kwargs), DeferredLogits, lambda each: each.real(operation))
        return function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"DeferredLogits(shape={list(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.real("a copy or a pickle").__reduce_ex__(protocol)

    def __array__(self, dtype: Any = None) -> Any:
        return self.real("numpy").__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._read_by_dlpack().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._read_by_dlpack().__dlpack_device__()

    def _read_by_dlpack(self) -> Tensor:
        if self.requires_grad:
            raise RuntimeError(NO_READER)
        return self.real("DLPack")

    def __deepcopy__(self, memo: Any) -> "DeferredLogits":
        return self.detach().clone()  # type: ignore[no-any-return]


def _laid_like(meta: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the strides of `meta`; they decide whether a reshape is a view."""
    strides = zip(meta.shape, meta.stride(), tensor.stride())
    if all(wanted == found for size, wanted, found in strides if size > 1):
        return tensor
    laid = torch.empty_strided(meta.shape, meta.stride(), dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)


def _check_gradients(deferred: list[DeferredLogits]) -> None:
    """Raise an error within an autograd.Function that was given logits that require a gradient.

    A Function computes no gradient for an argument that is not a tensor.
    """
    if torch.is_grad_enabled() or not in_function():
        return
    here = next(running_forwards(), None)
    if any(each.requires_grad and (here is None or each.head_call.forward is not here) for each in deferred):
        raise RuntimeError(refusal(describe_function(here)[0]))


@handles("grad", anywhere=True)
def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse torch.autograd.grad with respect to deferred logits."""
    if any(isinstance(each, DeferredLogits) for each in inputs):
        raise RuntimeError(f"torch.autograd.grad: {NO_GRADIENT}")
    return NotImplemented
