"""Make deferred logits a node of torch's pytrees, with one leaf.

Code that maps a function over a model's outputs calls the function with the leaf. torch's functions
of a leaf run on its logits.

FSDP2 and DistributedDataParallel search the leaves for the tensors to which they attach their work
before backward. So the leaf is a tensor: an alias of the hidden states, at their place in the
autograd graph.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node

from lowtide.core import torch_private
from lowtide.deferred.proxies.attributes import NO_GRADIENT
from lowtide.deferred.proxies.autograd_functions import described, in_function, refusal
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.proxies.proxy import replaced
from lowtide.deferred.recorded import expression


class LogitsLeaf(Tensor):
    """Represent deferred logits among the leaves of a pytree."""

    logits: DeferredLogits
    copied = False
    """True if it was copied in an autograd.Function (DistributedDataParallel has one)."""

    @classmethod
    @torch_private.no_frame_compiled
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name == "register_hook":
            return _register_hook(*args, **kwargs or {})
        if name == "__get__" and isinstance(args[0], LogitsLeaf):
            return _attribute(args[0], function.__self__.__name__)
        # An autograd.Function copies its inputs, or torch does where it returns them as they are.
        # An error would end the process here; see _behind_a_function.
        if name in ("clone", "view_as") and in_function() and not torch.is_grad_enabled():
            copy = super().__torch_function__(function, types, args, kwargs)
            logits = args[0].logits
            if name == "clone" and not logits.requires_grad:  # It may be changed in place.
                logits = logits.clone()
            return _made(copy, logits, copied=True)
        args, kwargs = replaced((tuple(args), kwargs or {}), LogitsLeaf, _logits)
        return DeferredLogits.call(function, args, kwargs)


def _logits(leaf: LogitsLeaf) -> DeferredLogits:
    if not leaf.copied:
        return leaf.logits
    with torch._C.DisableTorchFunctionSubclass():
        return _behind_a_function(leaf.logits, leaf.as_subclass(Tensor), leaf.grad_fn)


def _made(leaf: Any, logits: DeferredLogits, *, copied: bool) -> LogitsLeaf:
    leaf.logits, leaf.copied = logits, copied
    return leaf  # type: ignore[no-any-return]


def _attribute(leaf: LogitsLeaf, name: str) -> Any:
    if name == "_base":  # FSDP2 warns of views, which could be changed in place.
        return None
    if name == "grad_fn":  # Its hooks belong to the graph, which goes through the hidden states.
        with torch._C.DisableTorchFunctionSubclass():
            return leaf.grad_fn
    return getattr(leaf.logits, name)


def _register_hook(leaf: LogitsLeaf, hook: Any) -> Any:
    """Register a hook of torch.distributed, which has to run in backward but uses no gradient."""
    own = getattr(hook, "func", hook)  # Look inside a functools.partial.
    own = getattr(own, "__func__", own)
    if not str(getattr(own, "__module__", "")).startswith("torch."):
        raise RuntimeError(f"register_hook: {NO_GRADIENT}")
    for each in expression.linears(leaf.logits.node):
        for tensor in (each.input.tensor, each.weight.tensor):
            if tensor.requires_grad:
                return tensor.register_hook(hook)
    raise RuntimeError("cannot register a hook on logits that don't require gradient")


TRANSFORMED = (
    "a transform of torch.func (vmap, vjp, grad with has_aux, ...) can neither take nor return deferred "
    "logits; give it logits.materialize(), and return what is made of them there, or logits.materialize()"
)


class _Context:
    """Hold the logits of a leaf; trees with logits in the same places have equal structures."""

    def __init__(self, logits: DeferredLogits) -> None:
        self.logits = logits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context)

    def __hash__(self) -> int:
        return hash(_Context)


@torch_private.no_frame_compiled
def _flatten(logits: DeferredLogits) -> tuple[list[Any], _Context]:
    if logits.tensor is not None:
        return [logits.tensor], _Context(logits)
    if torch._C._functorch.maybe_current_level() is not None:
        raise RuntimeError(TRANSFORMED)
    hidden = expression.hidden(logits.node)
    if type(hidden) is not Tensor:  # A fake tensor cannot change its class, and needs no mapping.
        return [], _Context(logits)
    return [_made(hidden.as_subclass(LogitsLeaf), logits, copied=False)], _Context(logits)


@torch_private.no_frame_compiled
def _unflatten(leaves: Iterable[Any], context: _Context) -> Any:
    leaves, logits = list(leaves), context.logits
    if not leaves:
        return logits
    (leaf,) = leaves
    if isinstance(leaf, LogitsLeaf):
        return _logits(leaf)
    if logits.tensor is not None and leaf is logits.tensor:
        return logits
    # A transform wraps the leaf's own numbers, which are the hidden states.
    if logits.tensor is None and isinstance(leaf, Tensor) and torch_private.is_wrapped(leaf):
        raise RuntimeError(TRANSFORMED)
    return _behind_a_function(logits, leaf, leaf.grad_fn) if _is_alias(logits, leaf) else leaf


def _is_alias(logits: DeferredLogits, leaf: Any) -> bool:
    """Return True if the leaf is the hidden states as an autograd.Function returned them."""
    hidden = expression.hidden(logits.node)
    return (
        type(leaf) is Tensor
        and logits.tensor is None
        and leaf.dtype == hidden.dtype
        and leaf.shape == hidden.shape
        and leaf.stride() == hidden.stride()
        and leaf.data_ptr() == hidden.data_ptr()
    )


def _behind_a_function(logits: DeferredLogits, hidden: Tensor, grad_fn: Any) -> DeferredLogits:
    """Return the same logits, computed from hidden states that an autograd.Function returned.

    Raises:
        RuntimeError: the Function is not one of torch.distributed, which attach work to backward
            and pass gradients on. Another may change them, and the head's weight would not know.
    """
    if grad_fn is None:
        return logits
    function = getattr(grad_fn, "_forward_cls", None)
    if not getattr(function, "__module__", "").startswith(("torch.nn.parallel.", "torch.distributed.fsdp.")):
        raise RuntimeError(refusal(described(function)))
    node = expression.with_first_input(logits.node, lambda _: hidden)
    behind = logits.like(node, logits.meta, copied=True)
    behind.storage.before, behind.one_of_several = logits.storage, logits.one_of_several
    return behind


# DistributedDataParallel and FSDP2 search pytrees for tensors.
register_pytree_node(DeferredLogits, _flatten, _unflatten)
