"""Differentiate the operators; what backward needs depends on the reduction.

mean, sum   One number multiplies every row's gradient, so forward forms the gradients while it
            holds each chunk of logits. Backward multiplies them by the upstream gradient: in place
            where the graph is freed, out of place where the caller retains it.
none        Every row has its own upstream gradient, so backward computes the logits again.

Derivatives of higher order, and upstream gradients that a transform batches, differentiate the
definition.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import is_differentiated, scatter_gradients
from lowtide.core.pending_gradient import finish_gradients
from lowtide.ops.distillation import higher_order, ops
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.linear_cross_entropy.planning.requirements import choose_backend


def distillation(heads: Heads, options: DistillationOptions) -> Tensor:
    """Compute the divergence, with gradients for the student's tensors that require one."""
    tracked = torch.is_grad_enabled()
    needs_grad = [tracked and each is not None and each.requires_grad for each in heads.student]
    loss: Tensor = _Distillation.apply(options.with_graph_facts(heads, needs_grad), needs_grad, *heads)
    return loss


class _Distillation(torch.autograd.Function):
    """Differentiate the operator `distillation`."""

    @staticmethod
    def forward(
        ctx: Any, options: DistillationOptions, needs_grad: list[bool], *tensors: Tensor | None
    ) -> Tensor:
        now = needs_grad if options.reduction != "none" else [False] * len(needs_grad)
        loss, *rest = ops.distillation(*tensors, now, *options)
        ctx.options, ctx.needs_grad = options, needs_grad
        ctx.set_materialize_grads(False)
        if any(needs_grad):
            ctx.save_for_backward(*tensors, *rest)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options, needs_grad, count = ctx.options, ctx.needs_grad, len(Heads._fields)
        nothing: tuple[None, ...] = (None,) * (count - len(needs_grad))
        if grad_output is None:
            return (None, None, *(None for _ in needs_grad), *nothing)
        saved = ctx.saved_tensors
        heads, rest = Heads(*saved[:count]), saved[count:]
        if is_differentiated(grad_output):
            gradients = higher_order.gradients(heads, options, needs_grad, grad_output)
        elif options.reduction == "none":
            gradients = scatter_gradients(
                ops.distillation_backward(grad_output, *heads, needs_grad, *options), needs_grad
            )
        else:
            backend = choose_backend("auto", heads.device, options.sum_dtype)
            gradients = finish_gradients(rest, grad_output, heads.student, needs_grad, backend)
        return (None, None, *gradients, *nothing)
