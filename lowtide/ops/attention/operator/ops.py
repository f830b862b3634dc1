"""Register attention's operators with torch, and run them.

    attention             the result and, if asked for, the statistics of each row and the low half
                          of the result (operands.py)
    attention_backward    the gradients asked for among query, key, value and bias, in this order

The options name the backend that runs an operator. The operators have no derivative of their own;
autograd.py defines it. The fakes below give the shapes and dtypes of the outputs, and the formulas
give the FLOPs. FLOPs are those of all M N scores, because the formulas do not know the mask.

Shapes: B batches, H heads, M queries, N keys, K features, E of values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake

from lowtide.core.flop_formula import register_flop_formula
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import operator, schema_of
from lowtide.ops.attention.definition.operands import (
    AttentionOptions,
    Operands,
    allocate,
    allocate_low,
    sizes,
)
from lowtide.ops.attention.sdpa import kernels
from lowtide.ops.attention.torch_backend.backward import BlockwiseBackward
from lowtide.ops.attention.torch_backend.forward import Blockwise

OPERANDS, OPTIONS = schema_of(Operands), schema_of(AttentionOptions)


@operator("attention", f"({OPERANDS}, bool keep_statistics, {OPTIONS}) -> Tensor[]")
def attention(*arguments: Any) -> list[Tensor]:
    _, operands, keep_statistics, options = _parse(arguments)
    if options.backend == "sdpa":
        return kernels.forward(operands, options, keep_statistics)
    if options.backend == "triton":
        from lowtide.ops.attention.triton_backend import launch_forward  # imports Triton

        with torch.cuda.device_of(operands.query):
            return launch_forward.forward(operands, options, keep_statistics)
    with on_device_of(operands.query):
        return Blockwise(operands, options).forward(keep_statistics)


@operator(
    "attention_backward",
    "(Tensor grad_output, Tensor? grad_logsumexp, Tensor out, Tensor statistics, Tensor? low, "
    f"{OPERANDS}, bool[] needs_grad, {OPTIONS}) -> Tensor[]",
)
def attention_backward(*arguments: Any) -> list[Tensor]:
    saved, operands, needs_grad, options = _parse(arguments, saved=5)
    if options.backend == "sdpa":
        return kernels.backward(operands, options, needs_grad, *saved[:4])
    if options.backend == "triton":
        from lowtide.ops.attention.triton_backend import launch_backward

        with torch.cuda.device_of(operands.query):
            return launch_backward.backward(operands, options, needs_grad, *saved)
    with on_device_of(operands.query):
        return BlockwiseBackward(operands, options, needs_grad).backward(*saved[:4])


def _parse(arguments: Sequence[Any], saved: int = 0) -> tuple[Sequence[Any], Operands, Any, AttentionOptions]:
    """Return the arguments before the operands, the operands, what is asked for, and the options.

    `saved` is the number of arguments before the operands.
    """
    end = saved + len(Operands._fields)
    operands, options = Operands(*arguments[saved:end]), AttentionOptions(*arguments[end + 1 :])
    return arguments[:saved], operands, arguments[end], options


@register_fake("lowtide::attention")
def _(*arguments: Any) -> list[Tensor]:
    _, operands, keep_statistics, options = _parse(arguments)
    B, H, _, M, _, _, E = sizes(operands)
    out = allocate(operands.query, (B, H, M, E), options.rows_first)
    if not keep_statistics:
        return [out]
    statistics = operands.query.new_empty(operands.statistics_shape, dtype=operands.sum_dtype)
    return [out, statistics, allocate_low(out)] if options.keep_low else [out, statistics]


@register_fake("lowtide::attention_backward")
def _(*arguments: Any) -> list[Tensor]:
    _, operands, needs_grad, options = _parse(arguments, saved=5)
    gradients = [allocate(each, each.shape, options.rows_first) for each in operands[:3]]
    if operands.bias is not None:
        gradients.append(operands.bias.new_empty(operands.bias.shape))
    return [gradient for gradient, want in zip(gradients, needs_grad) if want]


@register_flop_formula(torch.ops.lowtide.attention)
def _(*shapes: Any, **_kwargs: Any) -> int:
    _, operands, _, _ = _parse(shapes)
    (B, H, M, K), (_, _, N, E) = operands.query, operands.value
    return 2 * B * H * M * N * (K + E)


@register_flop_formula(torch.ops.lowtide.attention_backward)
def _(*shapes: Any, **_kwargs: Any) -> int:
    _, operands, (query, key, value, bias), _ = _parse(shapes, saved=5)
    (B, H, M, K), (_, _, N, E) = operands.query, operands.value
    scores = query or key or bias
    return 2 * B * H * M * N * (K * (1 + query + key) + E * (value + scores))
