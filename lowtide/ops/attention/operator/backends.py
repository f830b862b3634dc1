"""Choose the backend that runs an operator, and call it.

The backends are the Triton kernels, tiles in plain torch and, in a compiled graph, torch's own
kernels.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lowtide.core.backend import kernels_run_on_the_cpu
from lowtide.core.matmul import on_device_of
from lowtide.ops.attention.definition.operands import Operands, Options, is_far
from lowtide.ops.attention.definition.validation import ArgumentError
from lowtide.ops.attention.sdpa import kernels
from lowtide.ops.attention.torch_backend.backward import BlockwiseBackward
from lowtide.ops.attention.torch_backend.forward import Blockwise


def forward(operands: Operands, options: Options, keep_statistics: bool) -> Any:
    """Run forward on the backend that the options name."""
    if options.backend == "sdpa":
        return kernels.forward(operands, options, keep_statistics)
    if options.backend == "triton":
        from lowtide.ops.attention.triton_backend.launch_forward import Kernels  # imports Triton

        with torch.cuda.device_of(operands.query):
            return Kernels(operands, options).forward(keep_statistics)
    with on_device_of(operands.query):
        return Blockwise(operands, options).forward(keep_statistics)


def backward(operands: Operands, options: Options, wanted: Any, *given: Any) -> Any:
    """Run backward on the backend that the options name; `given` is what the operator gets."""
    if options.backend == "sdpa":
        return kernels.backward(operands, options, wanted, *given)
    if options.backend == "triton":
        from lowtide.ops.attention.triton_backend.launch_backward import BackwardKernels

        upstream, logsumexp_upstream, *saved = given
        operands, (out, statistics) = _readable(operands, *saved)
        given = (upstream, logsumexp_upstream, out, statistics)
        with torch.cuda.device_of(operands.query):
            return BackwardKernels(operands, options, wanted).backward(*given)
    with on_device_of(operands.query):
        return BlockwiseBackward(operands, options, wanted).backward(*given)


def _readable(operands: Operands, out: Tensor, statistics: Tensor) -> tuple[Operands, tuple[Tensor, Tensor]]:
    """Copy the saved tensors that the kernels cannot read in their present strides.

    Hooks may bring saved tensors back in other strides.
    """
    matrices = (each.contiguous() if is_far(each) else each for each in (*operands[:3], out))
    query, key, value, out = matrices
    first, end = (None if each is None else each.contiguous() for each in (operands.first, operands.end))
    operands = operands._replace(query=query, key=key, value=value, first=first, end=end)
    return operands, (out, statistics.contiguous())


def chosen(operands: Operands, options: Options) -> str:
    """Return the name of the backend for this call; raise if a named one cannot run it.

    It is chosen once, before the call. An operator runs the backend that it is told, forward and
    backward.
    """
    if options.backend not in ("auto", "triton"):
        return options.backend
    reason = reason_against_triton(operands)
    if options.backend == "auto":
        # On the CPU "auto" does not run the interpreter, which is for tests.
        return "triton" if reason is None and operands.device.type == "cuda" else "torch"
    if reason is not None:
        raise ArgumentError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return "triton"


def reason_against_triton(operands: Operands) -> str | None:
    """Return why the Triton kernels cannot run this call, or None."""
    reason = _triton_refuses(operands.device, operands.query.dtype)
    if reason is None and any(is_far(tensor) for tensor in operands[:3]):
        reason = "its kernels count within a tile in 32 bits, and a stride is too large for that"
    return reason


def _triton_refuses(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot run on this device in this dtype, or None."""
    try:
        import triton  # noqa: F401
    except ModuleNotFoundError:
        return "triton is not installed"
    if device.type != "cuda" and not kernels_run_on_the_cpu():
        return f"its kernels run on CUDA tensors, and query is on {device}"
    if dtype == torch.float64:
        return "its kernels sum in float32, and query is float64"
    if device.type == "cuda" and not _is_known_to_run(device):
        return "its kernels are for NVIDIA cards from compute capability 8.0 on"
    return None


# This depends on machine and process alone, so a compiled graph takes it as a constant, untraced.
# torch.compiler.assume_constant_result sets the same mark, but imports all of torch.compile to do
# so.
_triton_refuses.__dict__["_dynamo_marked_constant"] = True


@cache
def _is_known_to_run(device: torch.device) -> bool:
    """Return True if the kernels are known to run on this card.

    A card that is not there, in a call that is only described, is taken for one that can.
    """
    if not torch.cuda.is_available():
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
