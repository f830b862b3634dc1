"""What a call must look like, said once: the argument, what was expected, what came, and what to do."""

from collections.abc import Sequence

import torch
from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")
BACKENDS = ("auto", "triton", "torch", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TARGET_DTYPES = (torch.int64, torch.int32)


def check_arguments(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [V, D]
    target: Tensor,  # [...]
    linear_bias: Tensor | None,  # [V]
    weight: Tensor | None,  # [V]
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    workspace: int | None,
    backend: str,
) -> None:
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    tensors |= {
        name: t for name, t in {"linear_bias": linear_bias, "weight": weight}.items() if t is not None
    }
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    _check_options(reduction, ignore_index, label_smoothing, workspace, backend)
    _check_shapes(input, linear_weight, target, linear_bias, weight)
    _check_dtypes(input, linear_weight, target, linear_bias, weight)
    if input.device.type not in ("cpu", "cuda"):
        raise ValueError(f"input must be on the CPU or a CUDA device, got {input.device}; move it")
    for name, tensor in tensors.items():
        if tensor.device != input.device:
            raise ValueError(
                f"{name} must be on input's device ({input.device}), got {tensor.device}; move one of them"
            )
    if weight is not None and weight.requires_grad:
        raise ValueError(
            "weight (class weights) takes no gradient, got a tensor that requires one; pass weight.detach()"
        )


def check_transforms(tensor: Tensor) -> None:
    functorch = torch._C._functorch
    if functorch.maybe_current_level() is not None or functorch.is_legacy_batchedtensor(tensor):
        raise NotImplementedError(
            "lowtide.linear_cross_entropy does not run under torch.func transforms (grad, vmap, jvp) or with "
            "batched gradients yet; pass backend='reference', which holds all logits"
        )


def _check_options(
    reduction: str, ignore_index: int, label_smoothing: float, workspace: int | None, backend: str
) -> None:
    for name, value, choices in (("reduction", reduction, REDUCTIONS), ("backend", backend, BACKENDS)):
        if value not in choices:
            raise ValueError(f"{name} must be one of {_listed(choices)}, got {value!r}")
    if not isinstance(ignore_index, int) or isinstance(ignore_index, bool):
        raise TypeError(f"ignore_index must be an int or None, got {ignore_index!r}")
    if not isinstance(label_smoothing, (int, float)) or isinstance(label_smoothing, bool):
        raise TypeError(f"label_smoothing must be a float, got {label_smoothing!r}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1], got {label_smoothing}")
    if workspace is not None and (not isinstance(workspace, int) or isinstance(workspace, bool)):
        raise TypeError(f"workspace must be a number of bytes (int) or None, got {workspace!r}")


def _check_shapes(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    if input.dim() < 1:
        raise ValueError("input must have shape [..., D], got a 0-d tensor")
    D = input.shape[-1]
    if linear_weight.dim() != 2 or linear_weight.shape[1] != D:
        raise ValueError(
            f"linear_weight must have shape [V, {D}] to match input {list(input.shape)}, "
            f"got {list(linear_weight.shape)}; pass the weight of a torch.nn.Linear as it is, without .T"
        )
    V = linear_weight.shape[0]
    if V == 0:
        raise ValueError(f"linear_weight must have at least one class, got shape {list(linear_weight.shape)}")
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target must have shape {list(input.shape[:-1])}, that of input without the last dimension, "
            f"got {list(target.shape)}; slice input and target alike, e.g. hidden[:, :-1] and tokens[:, 1:]"
        )
    for name, vector in (("linear_bias", linear_bias), ("weight", weight)):
        if vector is not None and vector.shape != (V,):
            raise ValueError(f"{name} must have shape [{V}], one number a class, got {list(vector.shape)}")


def _check_dtypes(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None
) -> None:
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(
            f"target must hold class indices, of dtype {_listed(TARGET_DTYPES)}, "
            f"got {target.dtype}; use target.long()"
        )
    for name, tensor in (("input", input), ("weight", weight)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be a floating-point tensor ({_listed(DTYPES)}), got {tensor.dtype}")
    autocast = torch.is_autocast_enabled(input.device.type)
    for name, tensor in (("linear_weight", linear_weight), ("linear_bias", linear_bias)):
        if tensor is None or tensor.dtype == input.dtype:
            continue
        if not (autocast and tensor.is_floating_point() and torch.float64 not in (tensor.dtype, input.dtype)):
            raise TypeError(
                f"{name} must have the dtype of input ({input.dtype}), got {tensor.dtype}; "
                "cast one of them, or run under torch.autocast"
            )


def _listed(choices: Sequence[object]) -> str:
    return ", ".join(repr(choice) for choice in choices)
