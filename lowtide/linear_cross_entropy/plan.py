"""Decide once: all that follows from shapes, dtypes and the device, and never from the values of tensors.

Shapes: N tokens, D features, V classes.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lowtide.linear_cross_entropy.workspace import Needs, spend

MIB = 1 << 20
DEFAULT_WORKSPACE = {"cpu": 64 * MIB, "cuda": 1024 * MIB}

# Operands of the path in exponentials.py: float16 has not the range for exp(z), float32 not the speed.
EXPONENTIAL_DTYPES = (torch.bfloat16,)

Reduction = Literal["mean", "sum", "none"]


@dataclass(frozen=True, slots=True)
class Plan:
    backend: str
    exponentials: bool
    """Whether the path of exponentials.py takes the call, or that of streamed.py, which takes any."""
    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    compute_dtype: torch.dtype
    """Operands of the products: the input's dtype, or autocast's. float32 for half precision on the CPU."""
    sum_dtype: torch.dtype
    """Logits, statistics and accumulators: float32, or float64 for float64."""
    grad_input: bool
    grad_weight: bool
    grad_bias: bool
    copies_rows: bool
    """Whether a chunk of the input must be copied, for its dtype or its strides, to be multiplied."""
    rows: int
    """Tokens per chunk."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V where no copy is needed."""
    weight_gradient: Literal["accumulate", "by_class"]
    block_rows: int
    """Tokens per tile of a class block ("by_class")."""
    block_classes: int
    """Classes per block ("by_class")."""

    @property
    def gradient(self) -> bool:
        return self.grad_input or self.grad_weight or self.grad_bias


def make_plan(
    input: Tensor,  # [..., D]
    linear_weight: Tensor,  # [V, D]
    linear_bias: Tensor | None,  # [V]
    *,
    weighted: bool,
    reduction: Reduction,
    ignore_index: int,
    label_smoothing: float,
    workspace: int | None,
    backend: str,
) -> Plan:
    device = "cuda" if input.is_cuda else "cpu"
    N, D, V = math.prod(input.shape[:-1]), input.shape[-1], linear_weight.shape[0]
    dtype = _autocast_dtype(input)
    sum_dtype = torch.promote_types(dtype, torch.float32)
    # torch has no half-precision product with a float32 result on the CPU.
    compute_dtype = dtype if device == "cuda" else sum_dtype
    backend = _choose_backend(backend, input.device, compute_dtype)

    tracked = torch.is_grad_enabled()
    grad_input = tracked and input.requires_grad
    grad_weight = tracked and linear_weight.requires_grad
    grad_bias = tracked and linear_bias is not None and linear_bias.requires_grad

    gradient = grad_input or grad_weight or grad_bias
    copies_rows = input.dtype != compute_dtype or not _multiplies(input)
    # On CUDA another dtype means autocast, and one copy of the whole weight: not the workspace's.
    casts_weight = linear_weight.dtype != compute_dtype and device == "cpu"
    copies_weight = casts_weight or 1 not in linear_weight.stride()
    exponentials = (
        backend == "triton"
        and _has_tensor_maps(input.device)
        and compute_dtype in EXPONENTIAL_DTYPES
        and linear_bias is None
        and label_smoothing == 0
        and _maps(input, linear_weight, copies_rows, compute_dtype)
    )

    sum_size, operand_size = sum_dtype.itemsize, compute_dtype.itemsize
    rounds_apart = backend == "torch" and compute_dtype != sum_dtype  # only a kernel can round in place
    logit = sum_size + (operand_size if rounds_apart else 0)
    if exponentials:  # a bfloat16 number, and a float32 sum for every tile of 256
        logits = V // 32 + ((V + 8) * operand_size if gradient else 0)
    else:
        logits = V * (logit if gradient else sum_size)
    row = logits + 16 * sum_size  # and statistics
    row += copies_rows * D * operand_size
    row += (exponentials and grad_weight) * D * operand_size
    row += (grad_input and (exponentials or input.dtype != sum_dtype)) * D * sum_size
    # The bias, its gradient, and a chunk's share of that.
    vectors = (3 * (linear_bias is not None) + weighted) * V * sum_size
    # A CUDA allocation is a multiple of 512 bytes, and some sixty vectors and numbers are small.
    fixed = (
        ((160 if exponentials else 32) + 8 * sum_size) * N + vectors + (32768 if device == "cuda" else 4096)
    )
    weight_sum = V * D * sum_size if grad_weight and linear_weight.dtype != sum_dtype else 0
    if workspace is None:
        workspace = DEFAULT_WORKSPACE[device] + (weight_sum if device == "cuda" else 0)
    sizes = spend(
        workspace,
        Needs(
            N=N,
            D=D,
            V=V,
            device=device,
            fixed=fixed,
            row=row,
            weight_sum=weight_sum,
            weight_copy=D * operand_size if copies_weight else 0,
            class_sum=D * sum_size,
            block_logit=logit,
            block_row=2 * D * operand_size,
        ),
    )
    return Plan(
        backend=backend,
        exponentials=exponentials,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        compute_dtype=compute_dtype,
        sum_dtype=sum_dtype,
        grad_input=grad_input,
        grad_weight=grad_weight,
        grad_bias=grad_bias,
        copies_rows=copies_rows,
        rows=sizes.rows,
        operand_classes=sizes.operand_classes,
        weight_gradient="accumulate" if sizes.accumulate else "by_class",
        block_rows=sizes.block_rows,
        block_classes=sizes.block_classes,
    )


def _autocast_dtype(input: Tensor) -> torch.dtype:
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return input.dtype


def _choose_backend(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    reason = _triton_refuses(device, dtype)
    if backend == "auto":
        return "triton" if device.type == "cuda" and reason is None else "torch"
    if backend == "triton" and reason is not None:
        raise ValueError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return backend


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return "triton is not installed"
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"its kernels run on CUDA tensors, and input is on {device}"
    if dtype == torch.float64:
        return "its kernels sum in float32, and input is float64"
    return None


def _has_tensor_maps(device: torch.device) -> bool:
    """Hopper: later cards have them too, but the tiles were measured, and fit its shared memory, there."""
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def _maps(input: Tensor, weight_VD: Tensor, copies_rows: bool, dtype: torch.dtype) -> bool:
    """Whether both can be read through tensor maps: rows of features, 16 bytes to the unit."""

    def aligned(tensor: Tensor) -> bool:
        return all(stride % 8 == 0 for stride in (*tensor.stride()[:-1], tensor.storage_offset()))

    rows = input.dim() <= 3 or _flattens(input)
    inner = input.stride(-1) == weight_VD.stride(-1) == 1 and input.shape[-1] % 8 == 0
    # A copy is aligned by itself.
    return (
        rows
        and inner
        and (copies_rows or aligned(input))
        and (weight_VD.dtype != dtype or aligned(weight_VD))
    )


def _flattens(input: Tensor) -> bool:
    """Whether [..., D] can be seen as [N, D] without a copy."""
    try:
        input.view(math.prod(input.shape[:-1]), input.shape[-1])
    except RuntimeError:
        return False
    return True


def _multiplies(input: Tensor) -> bool:
    """Whether [..., D] can be seen as an [N, D] that a product reads as it is: by rows, or by columns."""
    if not _flattens(input):
        return False
    flat_ND = input.view(math.prod(input.shape[:-1]), input.shape[-1])
    (N, D), (outer, inner) = flat_ND.shape, flat_ND.stride()
    return (inner == 1 and outer >= D) or (outer == 1 and inner >= N)
