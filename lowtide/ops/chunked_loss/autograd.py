"""The two differentiable forms of a call. Their inputs are all tensors that the loss depends on, so that
autograd, its hooks, DDP and FSDP see one ordinary gradient for each.

GradientInForward   One number multiplies every row's gradient: forward forms the gradients while it holds
                    each chunk. Backward multiplies them by the upstream gradient: in place where the graph
                    is freed behind it, out of place where the caller retains it.
Recompute           Backward computes each chunk again, with whatever upstream gradient there is.

A backward that is itself to be differentiated goes the way of higher_order.py, from the inputs.
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lowtide.core.errors import ArgumentError
from lowtide.core.pending_gradient import scaled
from lowtide.ops.chunked_loss.accumulate import HALVES, Kept
from lowtide.ops.chunked_loss.higher_order import Rows
from lowtide.ops.chunked_loss.loop import Job, form, form_again, loss_alone
from lowtide.ops.chunked_loss.validation import check_unchanged

Gradients = tuple[Tensor | None, ...]


class GradientInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> Tensor:
        loss, kept = form(job, tensors)
        ctx.job, ctx.changed = job, job.changed(tensors)
        ctx.set_materialize_grads(False)
        ctx.places = [place for place, each in enumerate(kept) if each is not None]
        pairs = [each for each in kept if each is not None]
        ctx.save_for_backward(*tensors, *(each for pair in pairs for each in pair))
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Gradients:  # type: ignore[override]
        job, needed = ctx.job, ctx.needs_input_grad[1:]
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors
        tensors, rest = saved[: len(needed)], saved[len(needed) :]
        if torch.is_grad_enabled():
            check_unchanged(ctx.changed)
            return (None, *Rows.of(job, 0).pull_back(tensors, (upstream,), needed))
        gradients: list[Tensor | None] = [None] * len(needed)
        for place, gradient, factor in zip(ctx.places, rest[::2], rest[1::2]):
            if needed[place]:
                gradients[place] = _scaled(job, Kept(gradient, factor), upstream)
        return (None, *gradients)


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, job: Job, *tensors: Tensor) -> Tensor:
        loss = loss_alone(job, tensors, graph=True, values=job.values)
        check_unchanged(job.changed(tensors))
        ctx.job, ctx.results = job, int(loss.dim() > 0)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Gradients:  # type: ignore[override]
        job, needed = ctx.job, ctx.needs_input_grad[1:]
        if upstream is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            return (None, *Rows.of(job, ctx.results).pull_back(tensors, (upstream,), needed))
        if is_batched(upstream):
            raise ArgumentError(
                "mode='recompute' takes one upstream gradient at a time: call autograd.grad once for each, "
                "without is_grads_batched"
            )
        return (None, *form_again(job, tensors, needed, upstream))


def is_batched(tensor: Tensor) -> bool:
    return torch._C._functorch.is_legacy_batchedtensor(tensor) or torch._C._functorch.is_batchedtensor(tensor)


def _scaled(job: Job, kept: Kept, upstream: Tensor) -> Tensor:
    gradient, factor = kept
    # float32 for half precision, so that the product is rounded once.
    upstream = upstream.to(torch.promote_types(gradient.dtype, torch.float32))
    if is_batched(upstream):
        factor = _by_row(job, factor, gradient) if factor is not None and factor.dim() else factor
        return (gradient * (upstream if factor is None else upstream * factor)).to(gradient.dtype)
    # A freed graph's tensors are ours to change; a retained one's will be read again.
    in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
    factor = upstream if factor is None else upstream * factor
    if factor.dim() == 0:
        return scaled(gradient, factor, gradient.dtype, _backend(gradient), in_place=in_place)
    if not in_place or not gradient.is_contiguous():  # as it may come back from hooks of saved tensors
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    flat = gradient.view(job.rows, *gradient.shape[len(job.leading) :])
    for own, (start, stop) in zip(factor, job.chunks):
        scaled(flat[start:stop], own, gradient.dtype, _backend(gradient), in_place=True)
    return gradient


def _backend(gradient: Tensor) -> str:
    """Torch's own product of a half and a float32 tensor takes three times as long on CUDA."""
    return "triton" if gradient.is_cuda and gradient.dtype in HALVES and find_spec("triton") else "torch"


def _by_row(job: Job, factor: Tensor, gradient: Tensor) -> Tensor:
    rows = torch.cat([own.expand(stop - start) for own, (start, stop) in zip(factor, job.chunks)])
    return rows.view(*job.leading, *(1,) * (gradient.dim() - len(job.leading)))
