"""Check the arguments of losses on log-probabilities, and reduce the losses of the rows."""

import torch
from torch import Tensor

from lowtide.core.checks import DTYPES, check_choice, check_dense, check_number
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy.definition.head import Reduction


def widened(axes: str, **tensors: Tensor) -> list[Tensor]:
    """Return the tensors in float32 or wider, after checking that all have the first one's shape.

    `axes` has one letter for each dimension, such as "BT".
    """
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor):
            check_dense(name, tensor)
        came = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        if came not in DTYPES:
            raise ArgumentTypeError(f"{name} must be a floating-point torch.Tensor, got {came}")
        if tensor.dim() != len(axes):
            raise ArgumentError(f"{name} must have shape [{', '.join(axes)}], got {list(tensor.shape)}")
        check_shape(name, tensor, first.shape)
    return [tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors.values()]


def check_shape(name: str, tensor: Tensor, shape: torch.Size, hint: str = "") -> None:
    """Raise unless `tensor` is a dense tensor of real numbers in this shape."""
    if not isinstance(tensor, Tensor):
        came = type(tensor).__name__
        raise ArgumentTypeError(f"{name} must be a torch.Tensor of shape {list(shape)}, got {came}{hint}")
    check_dense(name, tensor)
    if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in DTYPES):
        raise ArgumentTypeError(f"{name} must hold real numbers of 16 bits or more, got {tensor.dtype}")
    if tensor.shape != shape:
        raise ArgumentError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def check_numbers(**numbers: float | None) -> None:
    """Raise unless each is a real number or None."""
    if torch.compiler.is_compiling():  # a look at an integer's bits would compile each value anew
        return
    for name, number in numbers.items():
        if number is not None:
            check_number(name, number)


def reduced(loss_B: Tensor, reduction: Reduction) -> Tensor:
    """Return the losses of the rows as they are, or their mean or sum."""
    check_choice("reduction", reduction, ("mean", "sum", "none"))
    if reduction == "none":
        return loss_B
    return loss_B.mean() if reduction == "mean" else loss_B.sum()
