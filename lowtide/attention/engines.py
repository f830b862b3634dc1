"""Which engine runs an operator: the Triton kernels, or tiles in plain torch."""

from typing import Any

from lowtide.attention.blockwise import Blockwise
from lowtide.attention.blockwise_backward import BlockwiseBackward
from lowtide.attention.check import ArgumentError
from lowtide.attention.problem import Operands, Options


def forward(operands: Operands, options: Options, keep_logsumexp: bool) -> Any:
    if _chosen(operands, options) == "triton":
        return _kernels(operands, options).forward(keep_logsumexp)
    return Blockwise(operands, options).forward(keep_logsumexp)


def backward(operands: Operands, options: Options, wanted: Any, *given: Any) -> Any:
    if _chosen(operands, options) == "triton":
        return _kernels(operands, options).backward(*given, wanted)
    return BlockwiseBackward(operands, options, wanted).backward(*given)


def _kernels(operands: Operands, options: Options) -> Any:
    from lowtide.attention.launch import Kernels  # imports Triton

    return Kernels(operands, options)


def _chosen(operands: Operands, options: Options) -> str:
    # The kernels are right in the interpreter, and compile; until a card has measured them, by name only.
    if options.backend != "triton":
        return "torch"
    reason = _reason_against_triton(operands)
    if reason is not None:
        raise ArgumentError(f"backend='triton' cannot run this call: {reason}; use backend='auto' or 'torch'")
    return "triton"


def _reason_against_triton(operands: Operands) -> str | None:
    try:
        import triton
    except ModuleNotFoundError:
        return "triton is not installed"
    if operands.device.type != "cuda" and not triton.knobs.runtime.interpret:
        return f"its kernels run on CUDA tensors, and query is on {operands.device}"
    if operands.query.dtype.itemsize == 8:
        return "its kernels sum in float32, and query is float64"
    return None
