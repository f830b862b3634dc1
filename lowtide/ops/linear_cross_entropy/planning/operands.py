"""Tell how the engine of a call reads its operands, and which operands it cannot read.

Shapes: N tokens, D_k features of term k, V classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.strides import (
    address,
    aligned,
    copies_rows,
    lies_by_columns,
    lies_by_rows,
    maps_input,
    maps_weight,
    multiplies,
    needs_aligned_copy,
)
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.planning.call import CPU_UNITS, Call, backend_of

TILED = ("exponentials", "soft_targets")  # engines that read operands through tensor maps


class OperandAccess(NamedTuple):
    """Hold how an engine reads its operands; a tuple has one flag per linear term."""

    dtype: torch.dtype
    """Dtype of the GEMM operands.

    This is the options' dtype. For half precision on the CPU it is float32, except in the engines
    that use its bfloat16 units.
    """
    copies_rows: tuple[bool, ...]
    """True if a chunk of the input is copied, because of its dtype or its strides."""
    scales_in_gradient: tuple[bool, ...]
    """True if a chunk's rows of X, scaled for dW, can lie in the memory of its rows of dX.

    See exponentials/linear_term.py. For a sharded head they cannot: its rows of dX are computed
    before dW, and are summed over the ranks while dW is computed.
    """


def with_aligned_operands(head: Head, options: Options) -> Head:
    """Return the head with copies of the operands that GEMMs on CUDA read slowly.

    With such an operand a GEMM of cuBLAS takes 4 to 8 times as long, and tensor maps cannot read it
    (decision 0091).
    """
    if not needs_aligned_copies(head, options):
        return head
    dtype = options.compute_dtype
    inputs = (aligned(each, dtype, of_input=True) for each in head.inputs)
    weights = (aligned(each, dtype) for each in head.weights)
    return head.of([*inputs, *weights, head.bias, head.scale])


def needs_aligned_copies(head: Head, options: Options) -> bool:
    """Return True if `with_aligned_operands` copies an operand."""
    if head.device.type != "cuda" and options.backend != "triton":
        return False
    dtype = options.compute_dtype
    of_inputs = (needs_aligned_copy(each, dtype, of_input=True) for each in head.inputs)
    return any(of_inputs) or any(needs_aligned_copy(each, dtype) for each in head.weights)


def operand_access(call: Call) -> OperandAccess:
    """Return how the engine named in the options reads the operands of the call."""
    head, dtype = call.head, _dtype(call.head, call.options)
    scaled = (
        grad and input.dtype.itemsize >= dtype.itemsize and not call.options.sharded
        for input, grad in zip(head.inputs, call.needs_grad.inputs)
    )
    return OperandAccess(dtype, _copies(head, call.options, dtype), tuple(scaled))


def follows_columns(weight: Tensor, options: Options) -> bool:
    """Return True if a weight's gradient lies by columns, as the weight does.

    Autograd would copy a gradient by rows, slowly (decision 0105). A CPU's units write by rows, and
    the engines of a divided head may read such a weight from a copy by rows.
    """
    return not options.sharded and options.engine not in CPU_UNITS and lies_by_columns(weight)


def unreadable(head: Head, options: Options) -> tuple[bool, ...]:
    """Return for each input, then each weight, True if the engine cannot read its layout.

    An engine can read all tensors that it was chosen for. But the tensors that a compiled graph
    gets may begin at other addresses than those that it was compiled for, and saved-tensor hooks
    may return a tensor in another layout.
    """
    if options.engine in TILED:
        dtype = _dtype(head, options)
        inputs = zip(head.inputs, _copies(head, options, dtype))
        return (
            *(not maps_input(each, copies, address) for each, copies in inputs),
            *(not maps_weight(each, dtype, address) for each in head.weights),
        )
    if options.engine != "cpu_exponentials":
        return (False,) * (len(head.inputs) + len(head.weights))
    # The sharded engine reads some classes, spread over all. Of a weight by columns, no GEMM can.
    reads = (lies_by_rows if options.sharded else multiplies)(head.weights[0])
    return (*(False for _ in head.inputs), not reads, *(False for _ in head.weights[1:]))


def _dtype(head: Head, options: Options) -> torch.dtype:
    """Return the dtype of the GEMM operands.

    On the CPU torch has no half-precision GEMM with a float32 result, so operands are cast to
    float32 there, but by engines that have such a GEMM of their own (core/bfloat16_units).
    """
    own = head.device.type == "cuda" or options.engine in CPU_UNITS
    return options.compute_dtype if own else options.sum_dtype


def _copies(head: Head, options: Options, dtype: torch.dtype) -> tuple[bool, ...]:
    # On the CPU a chunk copies the rows that are kept, to leave out ignored rows (decision 0008).
    selects = head.device.type == "cpu" and backend_of(options.engine) == "torch"
    return tuple(selects or copies_rows(each, dtype) for each in head.inputs)
