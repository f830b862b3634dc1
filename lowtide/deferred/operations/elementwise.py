"""Record elementwise operations, and softmax over the classes."""

from typing import Any

import torch
from torch import Tensor, nn

from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.proxies.proxy import replaced
from lowtide.deferred.recorded import expression


def apply(name: str, *operands: Any) -> Any:
    """Record the call FUNCTIONS[name](*operands), whose first operand is deferred.

    Return NotImplemented if expression.Apply cannot hold another operand.
    """
    input = operands[0]
    recorded = [_operand(each, input) for each in operands]
    if any(each is None for each in recorded):
        return NotImplemented
    autocast = expression.autocast_dtype(input.device)
    dtype = _dtype(name, operands, device="cpu" if autocast is None else None)
    # Do not call the function on meta tensors: that imports Dynamo (2 s). Strides stay the same.
    meta = input.meta if name == "detach" else torch.empty_like(input.meta, dtype=dtype)
    node = expression.Apply(name, tuple(recorded), autocast, dtype)
    return input.like(node, meta, copied=name != "detach", view=("detach",))


def _operand(operand: Any, input: DeferredLogits) -> Any:
    """Return the operand in a form that expression.Apply can hold, or None if it has none."""
    if isinstance(operand, DeferredLogits):
        together = (
            operand.head_call is input.head_call
            and operand.shape == input.shape
            and operand.class_dim == input.class_dim
            and expression.hidden(operand.node).shape[:-1] == expression.hidden(input.node).shape[:-1]
        )
        return operand.checked() if together else None
    if not isinstance(operand, Tensor):
        return operand if isinstance(operand, (int, float, torch.dtype)) else None
    strided = _is_torchs_own(operand) and operand.layout == torch.strided
    if not strided or operand.is_nested or not operand.is_floating_point():
        return None
    if operand.device != input.device and operand.dim() > 0:
        return None  # torch then raises its own error.
    if operand.numel() == 1 and operand.dim() <= input.dim():
        shape = (1,) if operand.dim() else ()  # The number of dimensions decides dtype promotion.
        return operand.reshape(shape).to(input.device).clone()
    vector = 0 < operand.dim() <= input.dim() and operand.shape[-1] == input.classes
    if not vector or operand.shape[:-1].numel() != 1 or not input.classes_last:
        return None
    return expression.Vector(operand.reshape(-1).clone())


def _is_torchs_own(tensor: Tensor) -> bool:
    """Return whether no class but torch's decides what operations on the tensor mean."""
    if type(tensor) in (Tensor, nn.Parameter):
        return True
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import

    return type(tensor) is FakeTensor


def _dtype(name: str, operands: Any, device: str | None) -> torch.dtype:
    """Return the dtype of the result, which depends on promotion and autocast.

    The dtype is found by computing one number on `device`; None means the operands' device.
    """

    def one(each: Any) -> Any:
        if not isinstance(each, (DeferredLogits, Tensor)):
            return each
        return torch.zeros((1,) * each.dim(), dtype=each.dtype, device=device or each.device)

    with torch.no_grad():
        return expression.FUNCTIONS[name](*(one(each) for each in operands)).dtype


def _by_alias(*names: tuple[str, ...]) -> dict[str, str]:
    """Map each alias of a function to its first alias, which is its key in FUNCTIONS."""
    return {alias: aliases[0] for aliases in names for alias in aliases}


UNARY = _by_alias(("neg", "negative", "__neg__"), ("tanh",), ("exp",), ("clone",), ("detach",))
BINARY = _by_alias(
    ("add", "__add__", "__radd__"),
    ("mul", "multiply", "__mul__", "__rmul__"),
    ("sub", "subtract", "__sub__"),
    ("div", "divide", "true_divide", "__truediv__"),
)
CASTS = {"float": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}


@handles(*UNARY, pass_name=True)
def unary(name: str, input: DeferredLogits) -> Any:
    return apply(UNARY[name], input)


@handles("positive", "__pos__")
def positive(input: DeferredLogits) -> DeferredLogits:
    return input


@handles("dropout", "alpha_dropout")
def dropout(input: DeferredLogits, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """Return the logits themselves where dropout is off, as torch does."""
    return input if p == 0 or (not training and 0 <= p <= 1) else NotImplemented


@handles("requires_grad_")
def requires_grad_(input: DeferredLogits, requires_grad: bool = True) -> Any:
    """Leave logits as they are; detached ones that shall require a gradient become real, a leaf."""
    return input if requires_grad == input.requires_grad else NotImplemented


@handles(*BINARY, pass_name=True, anywhere=True)
def binary(name: str, input: Any, other: Any) -> Any:
    if isinstance(input, DeferredLogits):
        return apply(BINARY[name], input, other)
    return apply(BINARY[name], other, input) if BINARY[name] in ("add", "mul") else NotImplemented


@handles(*CASTS, pass_name=True)
def cast_by_name(name: str, input: DeferredLogits) -> Any:
    return cast(input, CASTS[name])


@handles("to", "type_as", anywhere=True)
def to(input: Any, *args: Any, **kwargs: Any) -> Any:
    """Record a cast; another device materialises the logits."""
    if not isinstance(input, DeferredLogits):  # Here the logits only give their dtype and device.
        args, kwargs = replaced(
            (args, kwargs), DeferredLogits, lambda z: torch.empty(0, dtype=z.dtype, device=z.device)
        )
        return input.to(*args, **kwargs)
    dtype = input.dtype
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor | DeferredLogits):
            device, dtype = each.device, each.dtype
        elif isinstance(each, torch.dtype):
            device, dtype = input.device, each
        elif isinstance(each, str | torch.device):
            device = torch.empty(0, device=each).device
        else:
            device = input.device if isinstance(each, bool) or each is None else None
        if device != input.device:
            return NotImplemented
    flags = [each for each in args if isinstance(each, bool)]  # non_blocking, copy
    copies = kwargs.get("copy", len(flags) > 1 and flags[1])
    return apply("clone", input) if copies and dtype == input.dtype else cast(input, dtype)


@handles("type")
def type_(input: DeferredLogits, dtype: Any = None) -> Any:
    return cast(input, dtype) if isinstance(dtype, torch.dtype) else NotImplemented


def cast(input: DeferredLogits, dtype: torch.dtype) -> Any:
    if dtype == input.dtype:
        return input
    return apply("to", input, dtype) if dtype.is_floating_point else NotImplemented


@handles(*expression.MIX_CLASSES, pass_name=True)
def softmax(
    name: str, input: DeferredLogits, dim: Any = None, *args: Any, dtype: Any = None, _stacklevel: int = 3
) -> Any:
    """Record a softmax or log-softmax over the classes.

    The functions of torch.nn.functional take a stacklevel before dtype.
    """
    dtype = next((each for each in args if isinstance(each, torch.dtype)), dtype)
    input = input if dtype is None else cast(input, dtype)
    if input is NotImplemented or not is_class_dim(input, dim) or len(args) > 2:
        return NotImplemented
    autocast, dtype = expression.autocast_dtype(input.device), _dtype(name, (input, -1), device=None)
    node = expression.Apply(name, (input.checked(), -1), autocast, dtype)
    # torch's result is contiguous, whatever its input is.
    return input.like(node, torch.empty(input.shape, dtype=dtype, device="meta"), copied=True)


def is_class_dim(input: DeferredLogits, dim: Any) -> bool:
    """Return whether `dim` names the dimension of the classes.

    If the logits have no dimension `dim`, torch raises the error once they are real.
    """
    whole = isinstance(dim, int) and not isinstance(dim, bool) and -input.dim() <= dim < input.dim()
    return whole and dim % input.dim() == input.class_dim
