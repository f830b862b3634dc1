"""Differentiate the operators.

Forward keeps its inputs, its result and the statistics of each row. Backward computes the scores
again, tile by tile. If backward is to be differentiated itself, or its upstream gradients are
batched, higher_order.py computes the gradients.

Shapes: B batches, H heads, M queries, E features of values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import differentiable_gradients, is_differentiated, placed
from lowtide.ops.attention.definition.operands import Operands, Options
from lowtide.ops.attention.operator import higher_order, ops

Gradients = tuple[Tensor | None, ...]


def attention(operands: Operands, options: Options, with_logsumexp: bool) -> tuple[Tensor, Tensor | None]:
    """Compute the result [B, H, M, E], and the logsumexp [B, H, M] if it is asked for.

    The backend that the options name runs forward and backward.
    """
    tracked = torch.is_grad_enabled()
    wanted = tuple(tracked and each is not None and each.requires_grad for each in operands.differentiable)
    out, logsumexp = _Attention.apply(options, wanted, with_logsumexp, *operands)
    return out, logsumexp


class _Attention(torch.autograd.Function):
    """Differentiate the operator `attention` by the operator `attention_backward`."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, wanted: tuple[bool, ...], with_logsumexp: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        out, *kept = ops.attention(*tensors, with_logsumexp or any(wanted), *options)
        ctx.options, ctx.wanted = options, wanted
        ctx.set_materialize_grads(False)
        if any(wanted):
            ctx.save_for_backward(*tensors, out, *kept)
        return out, kept[0].sum(2) if with_logsumexp else None

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None, logsumexp_upstream: Tensor | None) -> Gradients:  # type: ignore[override]
        nothing = (None, None, None)
        if upstream is None and logsumexp_upstream is None:
            return (*nothing, *(None,) * len(Operands._fields))
        *tensors, out, statistics = ctx.saved_tensors
        operands = Operands(*tensors)
        if is_differentiated(upstream, logsumexp_upstream):
            gradients = again(operands, ctx.options, ctx.wanted, (upstream, logsumexp_upstream))
        else:
            if upstream is None:
                upstream = torch.zeros_like(out)
            found = ops.attention_backward(
                upstream, logsumexp_upstream, out, statistics, *operands, ctx.wanted, *ctx.options
            )
            gradients = placed(found, ctx.wanted)
        return (*nothing, *gradients, None, None, None)


def again(
    operands: Operands, options: Options, wanted: Sequence[bool], upstream: Sequence[Tensor | None]
) -> Gradients:
    """Return the gradients as differentiable functions of the operands."""

    def attended(own: list[Tensor | None]) -> tuple[Tensor, ...]:
        return higher_order.attention(operands._replace(**dict(zip(Operands._fields, own))), options)

    return differentiable_gradients(attended, operands.differentiable, wanted, upstream)
