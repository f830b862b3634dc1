"""Differentiate the operators.

Forward saves its inputs, its result and the statistics of each row. Backward computes the scores
again, tile by tile. If backward itself is to be differentiated, or its upstream gradients are
batched, higher_order.py computes the gradients.

Shapes: B batches, H heads, M queries, E features of values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import differentiable_gradients, is_differentiated, scatter_gradients
from lowtide.core.operator import call
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, sizes
from lowtide.ops.attention.operator import higher_order, ops
from lowtide.ops.attention.triton_backend.tile_sizes import are_many_small, sums_bias_of_small

Gradients = tuple[Tensor | None, ...]

KEPT_FEATURES = 256  # the most features of a result whose low half is kept (decision 0055)


def attention(
    operands: Operands, options: AttentionOptions, with_logsumexp: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute the result [B, H, M, E], and the logsumexp [B, H, M] if it is asked for.

    The backend that the options name runs forward and backward.
    """
    options, needs_grad = with_gradients(operands, options)
    out, logsumexp = _Attention.apply(options, needs_grad, with_logsumexp, *operands)
    return out, logsumexp


def with_gradients(
    operands: Operands, options: AttentionOptions
) -> tuple[AttentionOptions, tuple[bool, ...]]:
    """Return the options with `keep_low` set, and which differentiable operands get gradients."""
    tracked = torch.is_grad_enabled()
    needs_grad = tuple(
        tracked and each is not None and each.requires_grad for each in operands.differentiable
    )
    # With more features the low half would take too much memory beside that of all scores.
    few = operands.value.shape[-1] <= KEPT_FEATURES
    half = operands.query.dtype.itemsize == 2
    keep_low = half and few and options.backend == "triton" and any((*needs_grad[:2], needs_grad[3]))
    return options._replace(keep_low=keep_low and not _sums_scores(operands, needs_grad[3])), needs_grad


def _sums_scores(operands: Operands, grad_bias: bool) -> bool:
    """Return True if backward sums over scores, as it does in small problems.

    In compiled graphs the answer is False: each size that is compared would be a guard.
    """
    if torch.compiler.is_compiling():
        return False
    size = sizes(operands)
    if operands.bias is not None and grad_bias and not sums_bias_of_small(operands.bias.shape, size.H):
        return False
    return are_many_small(size)


class _Attention(torch.autograd.Function):
    """Define the derivative of the operator `attention` by the operator `attention_backward`."""

    @staticmethod
    def forward(
        ctx: Any,
        options: AttentionOptions,
        needs_grad: tuple[bool, ...],
        with_logsumexp: bool,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        out, *kept = call(ops.attention, *tensors, with_logsumexp or any(needs_grad), *options)
        ctx.options, ctx.needs_grad = options, needs_grad
        ctx.set_materialize_grads(False)
        if any(needs_grad):
            ctx.save_for_backward(*tensors, out, *kept)
        return out, kept[0].sum(2) if with_logsumexp else None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_logsumexp: Tensor | None) -> Gradients:  # type: ignore[override]
        nothing = (None, None, None)
        if grad_output is None and grad_logsumexp is None:
            return (*nothing, *(None,) * len(Operands._fields))
        saved = ctx.saved_tensors
        count = len(Operands._fields)
        operands, (out, statistics, *low) = Operands(*saved[:count]), saved[count:]
        if is_differentiated(grad_output, grad_logsumexp):
            gradients = differentiable_backward(
                operands, ctx.options, ctx.needs_grad, (grad_output, grad_logsumexp)
            )
        else:
            if grad_output is None:
                grad_output = torch.zeros_like(out)
            found = call(
                ops.attention_backward,
                *(grad_output, grad_logsumexp, out, statistics, low[0] if low else None),
                *(*operands, ctx.needs_grad, *ctx.options),
            )
            gradients = scatter_gradients(found, ctx.needs_grad)
        return (*nothing, *gradients, None, None, None)


def differentiable_backward(
    operands: Operands,
    options: AttentionOptions,
    needs_grad: Sequence[bool],
    grad_output: Sequence[Tensor | None],
) -> Gradients:
    """Return the gradients as differentiable functions of the operands."""

    def attended(own: list[Tensor | None]) -> tuple[Tensor, ...]:
        return higher_order.attention(operands._replace(**dict(zip(Operands._fields, own))), options)

    return differentiable_gradients(attended, operands.differentiable, needs_grad, grad_output)
