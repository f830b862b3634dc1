"""Differentiate a call by one of two autograd functions, one for each mode.

The inputs of both are all tensors that the loss depends on. So autograd, its hooks, DDP and FSDP
see one ordinary gradient of each tensor.

GradientInForward   The loss is a sum, so its upstream gradient is one number, a factor of every
                    gradient. Forward computes the gradients while it holds each chunk. Backward
                    multiplies them by the upstream gradient: in place if the graph is freed, out of
                    place if the caller retains it.
Recompute           Backward computes each chunk again. The upstream gradient may differ by row.

torch.compile traces a backward only as part of compiled autograd. It then runs eagerly, like the
call itself.

With create_graph=True, the backward of both computes the gradients from the inputs again, by
higher_order.py.
"""

import itertools
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.checks import HALVES
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.core.pending_gradient import scaled
from lowtide.ops.chunked_loss.functional.snapshot import check_none
from lowtide.ops.chunked_loss.higher_order import Rows
from lowtide.ops.chunked_loss.job import Job
from lowtide.ops.chunked_loss.loop import loss_alone, loss_and_gradients, recomputed_gradients

Gradients = tuple[Tensor | None, ...]

WHY_EAGERLY = (
    "chunked_loss runs its chunks eagerly: compile the step without fullgraph=True, so that the code "
    "before and after it is compiled, or compile head"
)


class GradientInForward(torch.autograd.Function):
    """Compute the gradients in forward, and scale them in backward."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> Tensor:
        loss, pending = loss_and_gradients(job, tensors)
        ctx.job, ctx.changed = job, job.changed(tensors)
        ctx.set_materialize_grads(False)
        ctx.places = [place for place, each in enumerate(pending) if each is not None]
        pairs = [(each.tensor, each.remaining) for each in pending if each is not None]
        ctx.save_for_backward(*tensors, *itertools.chain(*pairs))
        return loss

    @staticmethod
    @torch_private.never_compiled(WHY_EAGERLY)
    def backward(ctx: Any, grad_output: Tensor | None) -> Gradients:  # type: ignore[override]
        job, needed = ctx.job, ctx.needs_input_grad[1:]
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        tensors, rest = saved[: len(needed)], saved[len(needed) :]
        if torch.is_grad_enabled():
            check_none(ctx.changed)
            return (None, *Rows.of(job, 0).pull_back(tensors, (grad_output,), needed))
        gradients: list[Tensor | None] = [None] * len(needed)
        for place, gradient, factor in zip(ctx.places, rest[::2], rest[1::2]):
            if needed[place]:
                gradients[place] = _scaled(job, gradient, factor, grad_output)
        return (None, *gradients)


class Recompute(torch.autograd.Function):
    """Keep the inputs in forward, and compute the chunks again in backward."""

    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> Tensor:
        loss = loss_alone(job, tensors, graph=True, values=job.losses)
        check_none(job.changed(tensors))
        ctx.job, ctx.results = job, int(loss.dim() > 0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return loss

    @staticmethod
    @torch_private.never_compiled(WHY_EAGERLY)
    def backward(ctx: Any, grad_output: Tensor | None) -> Gradients:  # type: ignore[override]
        job, needed = ctx.job, ctx.needs_input_grad[1:]
        if grad_output is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (None, *Rows.of(job, ctx.results).pull_back(tensors, (grad_output,), needed))
        if is_batched(grad_output):
            raise ArgumentError(
                "mode='recompute' takes one upstream gradient at a time: call autograd.grad once for each, "
                "without is_grads_batched"
            )
        return (None, *recomputed_gradients(job, tensors, needed, grad_output))


def is_batched(tensor: Tensor) -> bool:
    """Return True for a tensor that vmap, or autograd under is_grads_batched, has batched."""
    return torch_private.is_legacy_batched(tensor) or torch_private.is_batched(tensor)


def _scaled(job: Job, gradient: Tensor, factor: Tensor | None, grad_output: Tensor) -> Tensor:
    """Return gradient * factor * grad_output.

    A factor of None stands for 1. The factor is 0-d, or has one number for each chunk of rows.
    """
    if gradient.is_sparse:
        # torch 2.11 warns whoever makes a sparse tensor of indices and values.
        gradient = gradient.coalesce().clone()
        gradient.values().copy_(_scaled(job, gradient.values(), factor, grad_output))
        return gradient
    # Multiply in float32 for half precision, so that the result is rounded once.
    grad_output = grad_output.to(torch.promote_types(gradient.dtype, torch.float32))
    if factor is not None:  # torch would round a 0-d float64 to the dtype of a float32 vector
        factor = factor.to(grad_output.dtype)
    if is_batched(grad_output) or is_dtensor(gradient):
        factor = _by_row(job, factor, gradient) if factor is not None and factor.dim() else factor
        whole = grad_output if factor is None else grad_output * factor
        return (gradient.to(whole.dtype) * whole).to(gradient.dtype)
    # If the graph is freed, its tensors may be overwritten; if it is retained, they will be read
    # again.
    in_place = not torch_private.keeps_graph()
    factor = grad_output if factor is None else grad_output * factor
    if factor.dim() == 0:
        return scaled(gradient, factor, gradient.dtype, _backend(gradient), in_place=in_place)
    # Saved-tensor hooks may return the gradient with other strides.
    if not in_place or not gradient.is_contiguous():
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    flat = gradient.view(job.rows, *gradient.shape[len(job.leading) :])
    for own, chunk in zip(factor, job.chunks):
        scaled(flat[chunk], own, gradient.dtype, _backend(gradient), in_place=True)
    return gradient


def _backend(gradient: Tensor) -> str:
    """Return the backend that scales a gradient.

    On CUDA, torch takes three times as long as Triton to multiply a half-precision tensor by a
    float32 one.
    """
    return "triton" if gradient.is_cuda and gradient.dtype in HALVES and find_spec("triton") else "torch"


def _by_row(job: Job, factor: Tensor, gradient: Tensor) -> Tensor:
    """Return the factors of the chunks as one factor for each row."""
    rows = torch.cat([own.expand(chunk.stop - chunk.start) for own, chunk in zip(factor, job.chunks)])
    return rows.view(*job.leading, *(1,) * (gradient.dim() - len(job.leading)))
