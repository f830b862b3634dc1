"""Differentiate the operators of distillation; the way depends on the reduction.

mean, sum   The upstream gradient is one number for all rows. So forward forms the gradients while
            it holds each chunk of logits, and backward multiplies them by the upstream gradient:
            in place if the graph is freed, out of place if the caller retains it.
none        Each row has its own upstream gradient, so backward computes the logits again.

If the gradients are differentiated again, or if a transform batches the upstream gradient, backward
differentiates the definition instead (higher_order.py).
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.autodiff import is_differentiated, scatter_gradients
from lowtide.core.errors import ArgumentError
from lowtide.core.matmul import on_device_of
from lowtide.core.operator import call, seen_by_nobody, without_dispatcher
from lowtide.core.pending_gradient import finish_gradients
from lowtide.ops.distillation import higher_order, ops
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.linear_cross_entropy.planning.requirements import choose_backend
from lowtide.ops.linear_cross_entropy.ranks.messages import telling_errors


def distillation(heads: Heads, options: DistillationOptions) -> Tensor:
    """Compute the divergence, with gradients for the student's tensors that require one."""
    heads = heads.with_aligned_operands(options) if heads.device.type == "cuda" else heads
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
        loss, *rest = _call(ops.distillation, tensors, now, options)
        ctx.options, ctx.needs_grad = options, needs_grad
        ctx.set_materialize_grads(False)
        if any(needs_grad):
            ctx.save_for_backward(*tensors, *rest)
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        options, needs_grad = ctx.options, ctx.needs_grad
        nothing: tuple[None, ...] = (None,) * (len(Heads._fields) - len(needs_grad))
        waits = options.group and options.reduction == "none"  # all ranks run this backward together
        if grad_output is None and not waits:
            return (None, None, *(None for _ in needs_grad), *nothing)
        with telling_errors(options.group) if waits else contextlib.nullcontext():
            return (None, None, *_gradients(ctx, grad_output), *nothing)


def _gradients(ctx: Any, grad_output: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the student's tensors."""
    options, needs_grad, count = ctx.options, ctx.needs_grad, len(Heads._fields)
    saved = ctx.saved_tensors
    heads, rest = Heads(*saved[:count]), saved[count:]
    if is_differentiated(grad_output):
        refuse_divided(options)
        assert grad_output is not None
        return higher_order.gradients(heads, options, needs_grad, grad_output)
    if options.reduction == "none":
        number = rest[0] if options.group else None
        found = _call(ops.distillation_backward, (grad_output, number, *heads), needs_grad, options)
        return scatter_gradients(found, needs_grad)
    backend = choose_backend("auto", heads.device, options.sum_dtype)
    return finish_gradients(rest, grad_output, heads.student, needs_grad, backend)


def _call(
    operator: Any, tensors: Sequence[Tensor | None], needs_grad: list[bool], options: DistillationOptions
) -> list[Any]:
    """Call an operator; where kernels of Triton compute it, by a recording of like calls.

    The ranks of a group agree in each call, which no recording does.
    """
    first = next(each for each in tensors if each is not None)
    if (
        options.group
        or torch.compiler.is_compiling()
        or torch_private.below_autograd is None
        or choose_backend("auto", first.device, options.sum_dtype) != "triton"
        or not seen_by_nobody(tensors)
    ):
        return call(operator, *tensors, needs_grad, *options)
    from lowtide.core.recording.like_calls import call_alike  # imports Triton

    with on_device_of(first):
        return [*call_alike(without_dispatcher(operator), tensors, (tuple(needs_grad), *options))]


def refuse_divided(options: DistillationOptions) -> None:
    """Raise if the heads are divided over ranks, because the definition cannot run on them."""
    if options.group:
        raise ArgumentError(
            "heads whose classes are divided over ranks have first derivatives by backward alone: no "
            "create_graph=True, vmap, forward mode or torch.func; for these, gather both weights, and call "
            "without group"
        )
