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

from lowtide.core.autodiff import is_differentiated, placed
from lowtide.core.pending_gradient import finish_gradient
from lowtide.ops.distillation import higher_order, ops
from lowtide.ops.distillation.heads import Heads, Options
from lowtide.ops.linear_cross_entropy.planning.requirements import choose_backend


def distillation(heads: Heads, options: Options) -> Tensor:
    """Compute the divergence, with gradients for the student's tensors that require one."""
    tracked = torch.is_grad_enabled()
    wanted = [tracked and each is not None and each.requires_grad for each in heads.student]
    loss: Tensor = _Distillation.apply(options.told(heads, wanted), wanted, *heads)
    return loss


class _Distillation(torch.autograd.Function):
    """Differentiate the operator `distillation`."""

    @staticmethod
    def forward(ctx: Any, options: Options, wanted: list[bool], *tensors: Tensor | None) -> Tensor:
        now = wanted if options.reduction != "none" else [False] * len(wanted)
        loss, *waiting = ops.distillation(*tensors, now, *options)
        ctx.options, ctx.wanted = options, wanted
        ctx.set_materialize_grads(False)
        if any(wanted):
            ctx.save_for_backward(*tensors, *waiting)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options, wanted, count = ctx.options, ctx.wanted, len(Heads._fields)
        nothing: tuple[None, ...] = (None,) * (count - len(wanted))
        if upstream is None:
            return (None, None, *(None for _ in wanted), *nothing)
        saved = ctx.saved_tensors
        heads, waiting = Heads(*saved[:count]), iter(saved[count:])
        if is_differentiated(upstream):
            gradients = higher_order.gradients(heads, options, wanted, upstream)
        elif options.reduction == "none":
            gradients = placed(ops.distillation_backward(upstream, *heads, wanted, *options), wanted)
        else:
            backend = choose_backend("auto", heads.device, options.sum_dtype)
            gradients = tuple(
                finish_gradient(next(waiting), next(waiting) * upstream, like, backend) if grad else None
                for like, grad in zip(heads.student, wanted)
            )
        return (None, None, *gradients, *nothing)
