"""Check a call's arguments.

An error names the argument, what was expected, what was given, and what to do.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.autodiff import in_transform
from lowtide.core.checks import (
    DTYPES,
    check_choice,
    check_devices,
    check_number,
    check_softcap,
    check_tensors,
    check_workspace,
    listed,
)
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy.definition import advice
from lowtide.ops.linear_cross_entropy.definition.head import ROW_FACTORS, Arguments, Backend, Reduction

REDUCTIONS = get_args(Reduction)
BACKENDS = get_args(Backend)
NO_CLASS = -(1 << 63)  # no class has this index, nor does a caller give it as ignore_index
TARGET_DTYPES = (torch.int64, torch.int32, torch.uint8)


def check_arguments(
    inputs: Sequence[Tensor],  # each [..., D_k]
    linear_weights: Sequence[Tensor],  # each [V, D_k]
    target: Tensor,  # [...] or [..., V]
    linear_bias: Tensor | None,  # [V]
    arguments: Arguments,
) -> None:
    """Check the options of the head, and all tensors but factors of the rows and a normalizer."""
    weight, logit_scale = arguments.weight, arguments.logit_scale
    if len(inputs) != len(linear_weights) or not inputs:
        raise ArgumentError(
            "inputs and linear_weights must be as many, and one at least, "
            f"got {len(inputs)} and {len(linear_weights)}"
        )
    named = {"input": inputs[0], "linear_weight": linear_weights[0], "target": target}
    if len(inputs) > 1:
        named |= {f"inputs[{k}]": tensor for k, tensor in enumerate(inputs) if k}
        named |= {f"linear_weights[{k}]": tensor for k, tensor in enumerate(linear_weights) if k}
    if linear_bias is not None:
        named["linear_bias"] = linear_bias
    if weight is not None:
        named["weight"] = weight
    if isinstance(logit_scale, Tensor):
        named["logit_scale"] = logit_scale
    check_tensors(named)
    check_target_dtype(target)
    _check_head_options(arguments)
    for k, (input, linear_weight) in enumerate(zip(inputs, linear_weights)):
        names = ("input", "linear_weight") if k == 0 else (f"inputs[{k}]", f"linear_weights[{k}]")
        check_term(names, input, linear_weight)
    _check_shapes(inputs, linear_weights, target, linear_bias, weight)
    check_devices(named, meta=True)
    _check_dtypes(named)


def check_log_probs(
    inputs: Sequence[Tensor],  # each [..., D_k]
    linear_weights: Sequence[Tensor],  # each [V, D_k]
    target: Tensor,  # [...]
    linear_bias: Tensor | None,  # [V]
    arguments: Arguments,
) -> None:
    """Check a call for log-probabilities; a rank of a sharded head may have no classes."""
    weight = linear_weights[0]
    check_tensors({"linear_weight": weight})
    if weight.dim() > 2:
        raise ArgumentError(
            f"linear_weight must have shape [V, D] here, got {list(weight.shape)}: there are no "
            "log-probabilities of a K-dimensional head; call it for linear_weight[:, k] of each position k"
        )
    if weight.dim() == 2 and weight.shape[0] == 0 and arguments.shard is None:
        raise ArgumentError(f"linear_weight must have at least one class, got shape {list(weight.shape)}")
    check_arguments(inputs, linear_weights, target, linear_bias, arguments)
    if target.is_floating_point():
        raise ArgumentTypeError(f"target must hold class indices here, got {target.dtype}; use target.long()")
    check_ignore_index(arguments.ignore_index)


def check_loss(arguments: Arguments, target: Tensor, input: Tensor, rows: Sequence[int]) -> None:
    """Check the options of the loss; factors of the rows must have the shape `rows`."""
    check_loss_options(arguments, target)
    check_normalizer(arguments.normalizer, arguments.reduction, input)
    for name in ROW_FACTORS:
        _check_row_factor(name, getattr(arguments, name), input, rows)


def check_loss_options(arguments: Arguments, target: Tensor) -> None:
    """Check the options of the loss except factors of the rows and a normalizer."""
    ignore_index, z_loss, weight = arguments.ignore_index, arguments.z_loss, arguments.weight
    check_choice("reduction", arguments.reduction, REDUCTIONS)
    check_ignore_index(ignore_index)
    _check_smoothing(arguments.label_smoothing)
    check_number("z_loss", z_loss)
    if not 0 <= z_loss < math.inf:
        raise ArgumentError(f"z_loss must be a finite number of at least 0, got {z_loss}")
    if target.is_floating_point():
        if ignore_index is not None:
            raise ArgumentError(
                "ignore_index must be None where target holds class probabilities, "
                f"got {ignore_index}; take the rows that are not to count out of input and target"
            )
    elif weight is not None:
        _refuse_gradient("weight", weight, " (class weights)")


def _check_row_factor(name: str, factor: Tensor | None, input: Tensor, rows: Sequence[int]) -> None:
    if factor is None:
        return
    check_tensors({name: factor})
    if not factor.is_floating_point():
        raise ArgumentTypeError(
            f"{name} must be a floating-point tensor, got {factor.dtype}; use {name}.float()"
        )
    if factor.shape != torch.Size(rows):
        raise ArgumentError(
            f"{name} must have shape {list(rows)}, one number a row, got {list(factor.shape)}; "
            f"slice it like input and target, or pass {name}.expand(...) of that shape"
        )
    check_devices({"input": input, name: factor}, meta=True)
    _refuse_gradient(name, factor)


def _refuse_gradient(name: str, tensor: Tensor, what: str = "") -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name}{what} takes no gradient, got a tensor that requires one; pass {name}.detach()"
        )


def check_normalizer(normalizer: object, reduction: str, input: Tensor) -> None:
    """Check what a mean is divided by."""
    if normalizer is None:
        return
    if reduction != "mean":
        raise ArgumentError(
            "normalizer is what reduction='mean' divides the sum by in place of its own count, got it with "
            f"reduction={reduction!r}; leave reduction out, or leave normalizer out and divide the result"
        )
    check_divisor("normalizer", normalizer, input, "; pass lowtide.tokens_per_rank(target), or leave it out")


def check_divisor(name: str, normalizer: object, input: Tensor, hint: str = "") -> None:
    """Check that a divisor of a sum is a number above 0, or a 0-d tensor without a gradient."""
    if not isinstance(normalizer, Tensor):
        if not torch.compiler.is_compiling():  # a look at an integer's bits would compile each value anew
            check_number(name, normalizer)
        if not 0 < normalizer < math.inf:  # type: ignore[operator]
            raise ArgumentError(f"{name} must be a finite number above 0, got {normalizer}{hint}")
        return
    check_tensors({name: normalizer})
    if normalizer.dim() != 0 or normalizer.is_complex() or normalizer.dtype == torch.bool:
        raise ArgumentError(
            f"{name} must be a number or a 0-d tensor of one, "
            f"got {normalizer.dtype} of shape {list(normalizer.shape)}; pass its .sum()"
        )
    if normalizer.device.type != "cpu":  # a number in the CPU's memory goes to any device without waiting
        check_devices({"input": input, name: normalizer}, meta=True)
    _refuse_gradient(name, normalizer)
    if can_be_read(normalizer) and not 0 <= normalizer.item() < math.inf:
        raise ArgumentError(
            f"{name} must be a finite number above 0, or 0 for no token, got {normalizer.item()}{hint}"
        )


def can_be_read(tensor: Tensor) -> bool:
    """Return True for a plain tensor on the CPU, outside graphs, transforms and dispatch modes."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu"  # a fake tensor has a type of its own
    traced = torch.compiler.is_compiling() or torch_private.dispatch_modes() > 0
    return plain and not traced and not in_transform(tensor)


def check_ignore_index(ignore_index: object) -> None:
    if ignore_index is None:
        return
    if not _has_index(ignore_index):
        raise ArgumentTypeError(f"ignore_index must be an int or None, got {ignore_index!r}")
    if not -(1 << 63) <= operator.index(ignore_index) < 1 << 63:  # type: ignore[arg-type]
        raise ArgumentError(f"ignore_index must be a 64-bit integer, got {ignore_index}")


def check_target_dtype(target: Tensor) -> None:
    """Raise for a dtype that no target may have, whatever its shape."""
    if target.dtype not in (*DTYPES, *TARGET_DTYPES):
        raise _no_target(target)


def _no_target(target: Tensor) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"target must hold class indices, of dtype {listed(TARGET_DTYPES)}, or class probabilities, "
        f"got {target.dtype} of shape {list(target.shape)}; use target.long()"
    )


def check_classes(target: Tensor, V: int, ignore_index: int) -> None:
    """Raise for a target that is no class, on the CPU.

    On other devices the check would wait, and a graph cannot read the target. There such a target
    makes the loss NaN instead.
    """
    if target.device.type != "cpu" or torch.compiler.is_compiling():
        return
    target = target.long()
    invalid = ((target < 0) | (target >= V)) & (target != ignore_index)
    if bool(invalid.any()):
        classes = f"classes from 0 to {V - 1}" if V else "no class, as linear_weight has none,"
        found = int(target[invalid][0])
        if ignore_index == NO_CLASS:
            raise IndexError(f"target must hold {classes}, got {found}")
        raise IndexError(
            f"target must hold {classes} or ignore_index ({ignore_index}), got {found}"
            + advice.for_class(found)
        )


def _check_head_options(arguments: Arguments) -> None:
    check_choice("backend", arguments.backend, BACKENDS)
    check_workspace(arguments.workspace)
    check_softcap("softcap", arguments.softcap)
    logit_scale = arguments.logit_scale
    if isinstance(logit_scale, Tensor):
        if logit_scale.dim() != 0 or not logit_scale.is_floating_point():
            raise ArgumentError(
                "logit_scale must be a float or a 0-d floating-point tensor, "
                f"got {logit_scale.dtype} of shape {list(logit_scale.shape)}; "
                "one number for all tokens, as logit_scale.float().reshape(())"
            )
    elif logit_scale is not None:
        check_number("logit_scale", logit_scale)


def _check_smoothing(value: Any) -> None:
    """Raise unless torch takes the value for a float of at most 1.

    torch takes bools, NumPy scalars and 0-d tensors without gradient for floats.
    """
    number = value
    if not isinstance(value, (int, float)) and getattr(value, "shape", None) == ():
        number = None if getattr(value, "requires_grad", False) else value.item()
    if not isinstance(number, (int, float)):
        raise ArgumentTypeError(f"label_smoothing must be a float, got {value!r}")
    if number > 1:
        raise ArgumentError(f"label_smoothing must be in [0, 1], got {value}")


def _has_index(value: Any) -> bool:
    """Return True if torch takes the value for an int, as a NumPy integer or an integer tensor.

    A bool is not taken for an int here.
    """
    if isinstance(value, int):
        return not isinstance(value, bool)
    if isinstance(value, Tensor) and value.dtype == torch.bool:
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def check_term(names: tuple[str, str], input: Tensor, linear_weight: Tensor) -> None:
    if input.dim() < 1:
        raise ArgumentError(f"{names[0]} must have shape [..., D], got a 0-d tensor")
    D = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != D:
        raise ArgumentError(
            f"{names[1]} must have shape [V, {D}] to match {names[0]} {list(input.shape)}, "
            f"got {list(linear_weight.shape)}{advice.for_weight(names, input, linear_weight)}"
        )


def _check_shapes(
    inputs: Sequence[Tensor],
    linear_weights: Sequence[Tensor],
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
) -> None:
    V, leading = linear_weights[0].shape[0], inputs[0].shape[:-1]
    for k, (input, linear_weight) in enumerate(zip(inputs, linear_weights)):
        if input.shape[:-1] != leading:
            raise ArgumentError(
                f"inputs[{k}] must have shape [{', '.join(map(str, leading))}, D], got {list(input.shape)}"
            )
        if linear_weight.shape[0] != V:
            raise ArgumentError(f"linear_weights[{k}] must have {V} rows, got {list(linear_weight.shape)}")
    probabilities = target.is_floating_point() and target.dim() == len(leading) + 1
    if probabilities and target.shape != (*leading, V):
        raise ArgumentError(
            f"target must have shape {[*leading, V]} where it holds class probabilities, "
            f"got {list(target.shape)}"
            + advice.for_target(inputs[0], linear_weights[0], target, [*leading, V])
        )
    # One row without a batch may have a target of shape [1], as in torch. If V is 1, this is the
    # shape of a probability instead.
    one_class = len(leading) == 0 and target.shape == (1,) and V != 1
    if not (probabilities or one_class or target.shape == leading):
        what = advice.for_target(inputs[0], linear_weights[0], target, leading)
        if target.shape == (*leading, V):
            what = "; class probabilities must be of a floating-point dtype"
        raise ArgumentError(
            f"target must have shape {list(leading)}, that of input without the last dimension, "
            f"got {list(target.shape)}" + what
        )
    for name, vector in (("linear_bias", linear_bias), ("weight", weight)):
        if vector is not None and vector.shape != (V,):
            raise ArgumentError(f"{name} must have shape [{V}], one number a class, got {list(vector.shape)}")


def _check_dtypes(named: dict[str, Tensor]) -> None:
    input, target = named["input"], named["target"]
    probabilities = target.is_floating_point() and target.dim() == input.dim()
    if target.dtype not in (DTYPES if probabilities else TARGET_DTYPES):
        raise _no_target(target)
    for name, tensor in named.items():
        if name == "weight" and probabilities and not tensor.is_complex():
            continue  # it only multiplies; any real dtype will do
        if name in ("input", "weight", "logit_scale") and tensor.dtype not in DTYPES:
            raise ArgumentTypeError(
                f"{name} must be a floating-point tensor ({listed(DTYPES)}), got {tensor.dtype}"
            )
    autocast = input.device.type != "meta" and torch.is_autocast_enabled(input.device.type)
    for name, tensor in named.items():
        if name in ("input", "weight", "logit_scale", "target") or tensor.dtype == input.dtype:
            continue
        if name == "linear_bias" and tensor.dtype == torch.promote_types(input.dtype, torch.float32):
            continue  # the sums are in that dtype
        if not (autocast and tensor.is_floating_point() and torch.float64 not in (tensor.dtype, input.dtype)):
            raise ArgumentTypeError(
                f"{name} must have the dtype of input ({input.dtype}), got {tensor.dtype}; "
                "cast one of them, or run under torch.autocast"
            )
