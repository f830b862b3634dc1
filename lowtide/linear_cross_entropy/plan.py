"""Decide once: all that follows from shapes, dtypes and the device, and never from the values of tensors.

Shapes: N tokens, D features, V classes.

The workspace holds, beyond inputs, outputs and gradients:

    fixed       vectors of N and V elements; the float32 sum of a rounded weight gradient ("accumulate")
    per row     the float32 logits of a token; copies of its features and their gradient where dtypes differ
    operands    a copy of a block of the weight, where its dtype or strides do not suit the products

Whatever the fixed part leaves is spent on rows. Where the float32 sum of the weight gradient [V, D] leaves
too few, the weight gradient is formed class block by class block instead ("by_class"): exact as well, for
one more product.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

MIB = 1 << 20
DEFAULT_WORKSPACE = {"cpu": 64 * MIB, "cuda": 1024 * MIB}

# Operands of the path in exponentials.py: float16 has not the range for exp(z), float32 not the speed.
EXPONENTIAL_DTYPES = (torch.bfloat16,)

# Below so many rows a chunk, reading the weight and its accumulator costs more than the one recomputed
# product.
FEWEST_ROWS = {"cpu": 64, "cuda": 512}

# Tensor-core tiles are 128 rows high; the CPU's row block matters less.
ROW_TILE = {"cpu": 8, "cuda": 128}

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

    sum_size, operand_size = sum_dtype.itemsize, compute_dtype.itemsize
    rounded_weight_gradient = grad_weight and linear_weight.dtype != sum_dtype
    accumulator = V * D * sum_size if rounded_weight_gradient else 0
    if workspace is None:
        workspace = DEFAULT_WORKSPACE[device] + (accumulator if device == "cuda" else 0)

    gradient = grad_input or grad_weight or grad_bias
    copies_weight = _copies_weight(linear_weight, compute_dtype, device)
    exponentials = (
        backend == "triton"
        and _has_tensor_maps(input.device)
        and compute_dtype in EXPONENTIAL_DTYPES
        and linear_bias is None
        and label_smoothing == 0
        and _maps(input, linear_weight, compute_dtype)
    )
    row = 16 * sum_size  # statistics
    tile = (V + 8) * operand_size + V // 32 if exponentials else V * sum_size  # a token's logits
    if exponentials and not gradient:
        tile = V // 32
    if gradient and backend == "torch" and compute_dtype != sum_dtype:
        tile += V * operand_size  # only a kernel can round in place
    row += tile
    if input.dtype != compute_dtype or not _flattens(input):
        row += D * operand_size
    if exponentials and grad_weight:
        row += D * operand_size
    if grad_input and (exponentials or input.dtype != sum_dtype):
        row += D * sum_size

    # The bias, its gradient, and a chunk's share of that.
    vectors = (3 * (linear_bias is not None) + weighted) * V * sum_size
    # A CUDA allocation is a multiple of 512 bytes, and some sixty vectors and numbers are small.
    fixed = (160 if exponentials else 64) * N + vectors + (32768 if device == "cuda" else 4096)
    # A copy of fewer bytes than a row's logits would make many small products of one large one.
    least_copy = min(V * D * operand_size, max(row, D * operand_size)) if copies_weight else 0
    least = fixed + row + least_copy + (2 * D * sum_size if accumulator else 0)
    if workspace < least:
        raise ValueError(
            f"workspace must hold one row of {V} logits, which takes {least} bytes in this call, "
            f"got {workspace} bytes; pass a larger workspace, or None for the default"
        )

    room = workspace - fixed
    fewest = min(N, FEWEST_ROWS[device]) * row + least_copy
    accumulate = accumulator == 0 or room - accumulator >= fewest
    if accumulate:
        room -= accumulator
    operand_classes = V
    if copies_weight:
        # A quarter of the room for the copy, the rest for rows, is within a few per cent of the best split.
        copied = max(least_copy, min(room // 4, room - row))
        operand_classes = _whole_tiles(max(1, min(V, copied // (D * operand_size))), V)
        room -= operand_classes * D * operand_size
    rows = _even_chunks(N, max(1, room // row), ROW_TILE[device])

    # A class block wants its accumulator [B, D] and its logits [C, B] of about the same size.
    block_room = workspace - fixed
    class_row = D * (sum_size + (operand_size if copies_weight else 0))
    block_classes = _whole_tiles(max(1, min(V, block_room // 2 // class_row)), V)
    block_row = (
        block_classes * (sum_size + (operand_size if backend == "torch" else 0)) + 2 * D * operand_size
    )
    block_rows = _even_chunks(
        N, max(1, (block_room - block_classes * class_row) // block_row), ROW_TILE[device]
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
        rows=rows,
        operand_classes=operand_classes,
        weight_gradient="accumulate" if accumulate else "by_class",
        block_rows=block_rows,
        block_classes=block_classes,
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
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _maps(input: Tensor, weight_VD: Tensor, dtype: torch.dtype) -> bool:
    """Whether both can be read through tensor maps: rows of features, 16 bytes to the unit."""

    def aligned(tensor: Tensor) -> bool:
        if tensor.dtype != dtype:
            return True  # a fresh copy will be read
        *outer, last = tensor.stride()
        return last == 1 and all(stride % 8 == 0 for stride in (*outer, tensor.storage_offset()))

    rows = input.dim() == 3 or _flattens(input)
    inner = input.stride(-1) == weight_VD.stride(-1) == 1 and input.shape[-1] % 8 == 0
    return rows and inner and aligned(input) and aligned(weight_VD)


def _flattens(input: Tensor) -> bool:
    """Whether [..., D] can be seen as [N, D] without a copy."""
    try:
        input.view(-1, input.shape[-1])
    except RuntimeError:
        return False
    return True


def _copies_weight(weight_VD: Tensor, dtype: torch.dtype, device: str) -> bool:
    # On CUDA another dtype means autocast, and one copy of the whole weight: not the workspace's.
    cast = weight_VD.dtype != dtype and device == "cpu"
    return cast or 1 not in weight_VD.stride()


def _whole_tiles(classes: int, V: int) -> int:
    """Fewer than V classes, in whole tiles: products of an odd width fall back to slow, unaligned kernels."""
    return classes if classes == V or classes < 128 else classes - classes % 128


def _even_chunks(N: int, most: int, tile: int) -> int:
    """Rows per chunk: as few chunks as `most` rows allow, all of about the same size, in whole tiles."""
    if most >= N:
        return max(N, 1)
    most = most - most % tile if most >= tile else most
    even = -(-N // -(-N // most))
    return min(most, -(-even // tile) * tile) if most >= tile else even
