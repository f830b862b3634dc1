"""Check single arguments of a call.

Each error says what was expected, what was passed, and what to do.
"""

import math
import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.core.kernels.backend import reason_against

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


def check_tensors(named: Mapping[str, object]) -> None:
    """Check that each is a dense tensor."""
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            is_module = isinstance(tensor, torch.nn.Module) and name.endswith("weight")
            hint = _for_module(tensor, name) if is_module else ""
            raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}{hint}")
        check_dense(name, tensor)


def _for_module(module: torch.nn.Module, weight: str) -> str:
    """Return advice for a module passed as a head's weight, the argument named `weight`."""
    *_, (name, last) = module.named_modules()
    if not isinstance(last, torch.nn.Linear):
        return "; lowtide.chunked_loss takes any module as head"
    bias = "" if last.bias is None else f", and its .bias as {weight.removesuffix('weight')}bias"
    if last is module:
        return f"; pass its .weight{bias}"
    return f"; apply what comes before its Linear {name!r}, and pass that one's .weight{bias}"


def check_dense(name: str, tensor: Tensor) -> None:
    """Check that a tensor is neither nested, sparse nor quantized."""
    if _is_nested(tensor):  # first, since a nested tensor has no sizes
        kind = "a nested one; use torch.nested.to_padded_tensor(), or call for each of its tensors (unbind())"
    elif tensor.layout is not torch.strided:
        kind = f"one of layout {tensor.layout}; use .to_dense()"
    elif tensor.is_quantized:
        kind = "a quantized one; use .dequantize()"
    else:
        return
    raise ArgumentTypeError(f"{name} must be a dense tensor, got {kind}")


def _is_nested(tensor: Tensor) -> bool:
    # A batched tensor of vmap does not tell whether it wraps a nested one, so unwrap it.
    # torch.compile traces none of this.
    if not torch.compiler.is_compiling() and torch_private.current_level() is not None:
        while torch_private.is_wrapped(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor.is_nested


def check_devices(named: Mapping[str, Tensor], *, meta: bool = False) -> None:
    """Check that all tensors are on the device of the first, and that lowtide supports it.

    The meta device is accepted only with `meta`.
    """
    first = next(iter(named))
    device = named[first].device
    if device.type == "meta" and not meta:
        raise ArgumentError(f"{first} must have data, got a tensor on meta; move it to another device")
    if reason := reason_against(device):
        raise ArgumentError(f"{first} cannot be on {device}: {reason}; move it")
    for name, tensor in named.items():
        if tensor.device != device:
            raise ArgumentError(
                f"{name} must be on {first}'s device ({device}), got {tensor.device}; move one of them"
            )


def check_workspace(workspace: object) -> None:
    """Check that the workspace is a number of bytes or None."""
    if workspace is not None and (not isinstance(workspace, numbers.Integral) or isinstance(workspace, bool)):
        hint = "; 256 MiB are 256 * 2**20" if isinstance(workspace, str) else ""
        if isinstance(workspace, float) and workspace.is_integer():
            hint = f"; pass {int(workspace)}"
        raise ArgumentTypeError(f"workspace must be a number of bytes (int) or None, got {workspace!r}{hint}")


def check_softcap(name: str, softcap: object) -> None:
    """Check that the soft cap is a finite number above 0, or None."""
    if softcap is not None:
        check_number(name, softcap)
        if not 0 < softcap < math.inf:  # type: ignore[operator]
            raise ArgumentError(f"{name} must be a finite number above 0, or None for none, got {softcap}")


def check_choice(name: str, value: object, choices: Sequence[str], hint: str = "") -> None:
    """Check that the value is one of the choices; the hint is appended to the error message."""
    if not isinstance(value, str) or value not in choices:
        raise ArgumentError(f"{name} must be one of {listed(choices)}, got {value!r}{hint}")


def check_number(name: str, value: object) -> None:
    """Check that the value is a real number that a float can hold."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a float, got {value!r}")
    if isinstance(value, int) and value.bit_length() > 1000:
        raise ArgumentError(
            f"{name} must be a number that a float can hold, got one of {value.bit_length()} bits"
        )


def listed(choices: Sequence[object]) -> str:
    return ", ".join(repr(choice) for choice in choices)
