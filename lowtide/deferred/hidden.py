"""What a deferred head's forward is given in place of its hidden states.

The product with as many outputs as there are classes becomes deferred logits; anything else that the head
does on the way to one (dropout, an adapter's first product, a norm) is done at once, on the tensor.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowtide.deferred import tree
from lowtide.deferred.logits import BINARY, REFLECTED, DeferredLogits, Source

MATMULS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class NotDeferred(Exception):
    """For what the exception says, the head's forward is to be run on the tensor."""


class DeferredHidden:
    def __init__(self, tensor: Tensor, classes: int, source: Source, grad: bool) -> None:
        self.tensor, self.classes, self.source, self.grad = tensor, classes, source, grad

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = getattr(self.tensor, name)
        if not callable(found):
            return found
        return functools.partial(_call_method, getattr(Tensor, name), self)


def call(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, DeferredHidden))
    if hidden.grad and not torch.is_grad_enabled():
        # Within an autograd.Function (a quantised head's), which sees no tensor to take a gradient for.
        raise NotDeferred("the head's own autograd.Function")
    if args[:1] == (hidden,) and len(args) > 1:
        weight = bias = None
        if function is F.linear:
            weight, bias = (*args[1:], kwargs.get("bias"))[:2]
        elif function in MATMULS and args[1].dim() == 2:
            weight = args[1].t()
        if weight is not None and _product(hidden, weight, bias):
            if is_traceable_wrapper_subclass(weight):
                raise NotDeferred(f"a weight that is a {type(weight).__name__}")
            if hasattr(weight, "ds_id"):  # gathered for as long as the head's forward runs
                raise NotDeferred("a weight that DeepSpeed ZeRO-3 partitions")
            return _logits(hidden, weight, bias)
    args = tuple(each.tensor if isinstance(each, DeferredHidden) else each for each in args)
    kwargs = {k: each.tensor if isinstance(each, DeferredHidden) else each for k, each in kwargs.items()}
    found = function(*args, **kwargs)
    again = isinstance(found, Tensor) and found.is_floating_point() and found.dim() > 0
    return DeferredHidden(found, hidden.classes, hidden.source, hidden.grad) if again else found


def _call_method(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call(method, args, kwargs)


def _product(hidden: DeferredHidden, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether it is the one with the classes, and will not raise."""
    x = hidden.tensor
    autocast = tree.autocast_dtype(x.device) is not None and x.dtype != torch.float64
    return (
        weight.shape == (hidden.classes, x.shape[-1])
        and x.dim() > 0
        and x.device.type in ("cpu", "cuda")
        and weight.device == x.device
        and (bias is None or (bias.shape == (hidden.classes,) and bias.device == x.device))
        and all(autocast or each is None or each.dtype == x.dtype for each in (weight, bias))
    )


def _logits(hidden: DeferredHidden, weight: Tensor, bias: Tensor | None) -> DeferredLogits:
    x, autocast = hidden.tensor, tree.autocast_dtype(hidden.tensor.device)
    dtype = x.dtype if autocast is None or x.dtype == torch.float64 else autocast
    meta = torch.empty(*x.shape[:-1], hidden.classes, dtype=dtype, device="meta")
    node = tree.linear(_same(x), _same(weight), None if bias is None else _same(bias), autocast)
    return DeferredLogits(node, meta, hidden.source, meta.dim() - 1)


def _same(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return tensor
    return _Same.apply(tensor)


class _Same(torch.autograd.Function):
    """The same numbers with a place in the graph of their own, as an output of the head has one: FSDP2 hangs
    hooks there, DDP follows it to the weight."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


def _operator(name: str) -> Callable[..., Any]:
    def operator(*args: Any) -> Any:
        return call(getattr(Tensor, name), args, {})

    return operator


for _name in (*BINARY, *REFLECTED, "getitem", "neg"):
    setattr(DeferredHidden, f"__{_name}__", _operator(f"__{_name}__"))
