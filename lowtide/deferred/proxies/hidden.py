"""Define the proxy that a deferred head's forward receives in place of its hidden states.

The product with as many outputs as there are classes becomes deferred logits. Operations of the
head before that product (dropout, an adapter's first product, a norm) run at once, on the tensor.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map

from lowtide.core.collectives import is_dtensor
from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.proxies.proxy import Proxy, flat, replaced, spelled
from lowtide.deferred.recorded import expression, sharded
from lowtide.deferred.recorded.expression import record_shared
from lowtide.ops.linear_cross_entropy.data_sharded import is_data_sharded

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)


class NotDeferred(Exception):
    """Signal that the head's forward must run on the tensor; the message gives the reason."""


class DeferredHidden(Proxy):
    """Stand for the hidden states within the head's forward."""

    def __init__(self, tensor: Tensor, head_call: HeadCall) -> None:
        self.tensor, self.head_call = tensor, head_call

    def attribute(self, name: str) -> Any:
        return getattr(self.tensor, name)

    @classmethod
    def call(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        hidden = next(each for each in flat((args, kwargs)) if isinstance(each, DeferredHidden))
        if hidden.head_call.grad and not torch.is_grad_enabled():
            # An autograd.Function in the head (a quantised head has one) would find no tensor to
            # differentiate.
            raise NotDeferred("the head's own autograd.Function")
        weight, bias = _factors(function, hidden, args, kwargs)
        if weight is not None and _is_product(hidden, weight, bias):
            return _logits(hidden, weight, bias)
        args, kwargs = replaced((tuple(args), kwargs), DeferredHidden, lambda each: each.tensor)
        return hidden.followed_by(function(*args, **kwargs), function)

    def followed_by(self, result: Any, function: Callable[..., Any]) -> Any:
        """Return what the function made of the hidden states, with proxies for its tensors."""
        if isinstance(result, (tuple, list)):  # chunk, split, recurrent layers, attention
            return type(result)([self.followed_by(each, function) for each in result])
        if not isinstance(result, Tensor) or not result.is_floating_point() or result.dim() == 0:
            return result
        # These are real logits, made by a kind of product that is not recorded.
        if result.shape[-1] == self.head_call.classes != self.tensor.shape[-1]:
            name = getattr(function, "__name__", str(function))
            self.head_call.accounted = True
            return self.head_call.counts.on(result, spelled(name))
        return DeferredHidden(result, self.head_call)

    def returned(self, output: Any) -> Any:
        """Return the output of the head's forward with tensors in place of its proxies.

        If its logits were made without a call that the proxies have seen, they are counted as real.
        """
        if isinstance(output, DeferredLogits):
            return output

        def change(leaf: Any) -> Any:
            if isinstance(leaf, DeferredHidden):
                return leaf.tensor
            call = self.head_call
            is_tensor = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 0
            if call.accounted or not is_tensor or leaf.shape[-1] != call.classes:
                return leaf
            call.accounted = True
            return call.counts.on(leaf, "the head's own forward")

        return tree_map(change, output, is_leaf=lambda each: isinstance(each, Proxy))


def _factors(
    function: Callable[..., Any], hidden: DeferredHidden, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Tensor | None, Tensor | None]:
    """Return weight [V, D] and bias if the function multiplies the hidden states by a matrix."""
    if function is F.linear:
        given = dict(zip(("input", "weight", "bias"), args)) | kwargs
        first, weight, bias = (given.get(name) for name in ("input", "weight", "bias"))
        return (weight, bias) if first is hidden and isinstance(weight, Tensor) else (None, None)
    if function in MATMULS and len(args) == 2 and args[0] is hidden:
        matrix = args[1]
        return (matrix.t() if isinstance(matrix, Tensor) and matrix.dim() == 2 else None), None
    return None, None


def _is_product(hidden: DeferredHidden, weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if this product makes the logits, and torch would run it without an error.

    Raises:
        NotDeferred: the product makes the logits, but its operands cannot be recorded.
    """
    x, classes = hidden.tensor, hidden.head_call.classes
    autocast = expression.autocast_dtype(x.device) is not None and x.dtype != torch.float64
    fits = (
        weight.shape == (classes, x.shape[-1])
        and x.dim() > 0
        and x.device.type != "meta"
        and weight.device == x.device
        and (bias is None or (bias.shape == (classes,) and bias.device == x.device))
        and all(
            autocast or each is None or each.dtype == x.dtype or is_data_sharded(each)
            for each in (weight, bias)
        )
    )
    if not fits:
        return False
    # Without a version counter a change would go unnoticed.
    if not torch.compiler.is_compiling() and weight.is_inference():
        raise NotDeferred("a weight made in inference mode")
    if hasattr(weight, "ds_id"):  # Such a weight is gathered only while the head's forward runs.
        raise NotDeferred("a weight that DeepSpeed ZeRO-3 partitions")
    if is_dtensor(weight) and sharded.takes(weight):
        if sharded.local_input(x, weight) is None:
            raise NotDeferred(f"hidden states of placements {x.placements}")  # type: ignore[attr-defined]
        return True
    for name, each in (("a weight", weight), ("hidden states", x), ("a bias", bias)):
        if each is not None and is_traceable_wrapper_subclass(each):
            raise NotDeferred(f"{name} that is a {type(each).__name__}")
        if each is not None and (each.layout != torch.strided or each.is_nested):
            raise NotDeferred(f"{name} of layout {each.layout}")
    return True


def _logits(hidden: DeferredHidden, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
    x, autocast = hidden.tensor, expression.autocast_dtype(hidden.tensor.device)
    dtype = x.dtype if autocast is None or x.dtype == torch.float64 else autocast
    meta = torch.empty(*x.shape[:-1], hidden.head_call.classes, dtype=dtype, device="meta")
    x = sharded.local_input(x, weight)
    if is_dtensor(weight) and not is_data_sharded(weight):
        hidden.head_call.mesh = weight.device_mesh  # type: ignore[attr-defined]
        hidden.head_call.placements = sharded.by_classes(meta.dim())
    hidden.head_call.accounted = True
    node = expression.Linear(record_shared(x), record_shared(weight), sharded.copied(bias), autocast, dtype)
    return DeferredLogits(node, meta, hidden.head_call, meta.dim() - 1)
