"""Describe the operators to a graph without running them: shapes, dtypes and FLOPs.

FLOPs are those of all M N scores, since a graph knows no mask.

Shapes: B batches, H heads, M queries, N keys, K features, E of values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import register_fake
from torch.utils.flop_counter import register_flop_formula

from lowtide.ops.attention.definition.operands import Operands, Options, sizes
from lowtide.ops.attention.operator import ops  # noqa: F401  imported to register the operators
from lowtide.ops.attention.torch_backend.chunk import allocate


@register_fake("lowtide::attention")
def _(*arguments: Any) -> list[Tensor]:
    operands, keep_statistics, options = Operands(*arguments[:7]), arguments[7], Options(*arguments[8:])
    B, H, _, M, _, _, E = sizes(operands)
    out = allocate(operands.query, (B, H, M, E), options.rows_first)
    if not keep_statistics:
        return [out]
    return [out, operands.query.new_empty(operands.statistics_shape, dtype=operands.sum_dtype)]


@register_fake("lowtide::attention_backward")
def _(*arguments: Any) -> list[Tensor]:
    operands, wanted, options = Operands(*arguments[4:11]), arguments[11], Options(*arguments[12:])
    gradients = [allocate(each, each.shape, options.rows_first) for each in operands[:3]]
    if operands.bias is not None:
        gradients.append(operands.bias.new_empty(operands.bias.shape))
    return [gradient for gradient, want in zip(gradients, wanted) if want]


@register_flop_formula(torch.ops.lowtide.attention)
def _(query: Any, key: Any, value: Any, *rest: Any, **kwargs: Any) -> int:
    B, H, M, K = query
    N, E = value[-2:]
    return 2 * B * H * M * N * (K + E)


@register_flop_formula(torch.ops.lowtide.attention_backward)
def _(
    upstream: Any,
    logsumexp_upstream: Any,
    out: Any,
    statistics: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    first: Any,
    end: Any,
    seed: Any,
    wanted: Any,
    *options: Any,
    **kwargs: Any,
) -> int:
    B, H, M, K = query
    N, E = value[-2:]
    grad_query, grad_key, grad_value, grad_bias = wanted
    of_scores = grad_query or grad_key or grad_bias
    return 2 * B * H * M * N * (K * (1 + grad_query + grad_key) + E * (grad_value + of_scores))
