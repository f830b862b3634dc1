"""The differentiable op. What backward needs depends on the reduction:

mean, sum   One number multiplies every row's gradient, so forward forms the gradients while it holds each
            chunk of logits (three products in all). Backward multiplies them by the upstream gradient: in
            place where the graph is freed behind it, out of place where the caller retains it.
none        Every row has its own upstream gradient. Forward keeps two numbers a row, backward computes the
            logits again (four products).

Shapes: N tokens, D features, V classes.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.linear_cross_entropy.check import check_transforms
from lowtide.linear_cross_entropy.plan import Plan
from lowtide.linear_cross_entropy.rows import Statistics
from lowtide.linear_cross_entropy.scaling import scale_into
from lowtide.linear_cross_entropy.streamed import Gradients, Kept, Stream


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    class_weight: Tensor | None,
    plan: Plan,
) -> Tensor:
    loss = _LinearCrossEntropy.apply(input, linear_weight, linear_bias, target, class_weight, plan)
    # Shaped out here: a view made inside the function could not be changed in place.
    return loss.view(target.shape) if plan.reduction == "none" else loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        linear_weight: Tensor,
        linear_bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        plan: Plan,
    ) -> Tensor:
        ctx.plan, ctx.shape = plan, input.shape
        ctx.set_materialize_grads(False)
        # Triton launches on the current device, whatever the tensors'.
        with torch.cuda.device_of(input), torch.autocast(input.device.type, enabled=False):
            stream = _stream(plan, input, linear_weight, linear_bias, target, class_weight)
            if plan.reduction == "none":
                statistics = stream.take_statistics()
                if plan.gradient:
                    ctx.save_for_backward(
                        input,
                        linear_weight,
                        linear_bias,
                        target,
                        class_weight,
                        statistics.max_N,
                        statistics.sum_N,
                    )
                return stream.loss_N(statistics)

            denominator = stream.denominator() if plan.reduction == "mean" else None
            if not plan.gradient:
                statistics = stream.take_statistics()
            else:
                statistics, gradients = stream.take_statistics_and_gradients(_factor(stream, denominator))
                _save(ctx, gradients)
            loss = stream.loss_N(statistics).sum()
            return loss if denominator is None else loss / denominator

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grad_loss is None:
            return (None,) * 6
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "lowtide.linear_cross_entropy has no derivatives of higher order (create_graph=True) yet; "
                "pass backend='reference', which holds all logits"
            )
        check_transforms(grad_loss)
        with torch.cuda.device_of(grad_loss), torch.autocast(grad_loss.device.type, enabled=False):
            if ctx.plan.reduction == "none":
                input, linear_weight, linear_bias, target, class_weight, max_N, sum_N = ctx.saved_tensors
                stream = _stream(ctx.plan, input, linear_weight, linear_bias, target, class_weight)
                statistics = Statistics(
                    max_N, sum_N, max_N, None
                )  # the loss is known: its parts are not asked for
                gradients = stream.gradients(statistics, grad_loss.flatten())
                finished = [_finish(kept, None, ctx.plan, in_place=True) for kept in _all(gradients)]
            else:
                # A freed graph's tensors are ours to change; a retained one's will be read again.
                in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
                finished = [_finish(kept, grad_loss, ctx.plan, in_place=in_place) for kept in _load(ctx)]
        grad_input, grad_weight, grad_bias = finished
        if grad_input is not None:
            grad_input = grad_input.view(ctx.shape)
        return grad_input, grad_weight, grad_bias, None, None, None


def _stream(plan: Plan, *operands: Tensor | None) -> Stream:
    if plan.exponentials:
        from lowtide.linear_cross_entropy.exponentials import ExponentialStream  # imports Triton

        return ExponentialStream(plan, *operands)
    return Stream(plan, *operands)


def _factor(stream: Stream, denominator: Tensor | None) -> Tensor:
    if denominator is None:
        return torch.ones((), dtype=stream.plan.sum_dtype, device=stream.device)
    # With every row ignored the loss is NaN and the gradients are zero, as in torch.
    return 1 / denominator.masked_fill(stream.ignored_N.all(), 1)


def _all(gradients: Gradients) -> tuple[Kept | None, Kept | None, Kept | None]:
    return gradients.input, gradients.weight, gradients.bias


def _save(ctx: Any, gradients: Gradients) -> None:
    kept = _all(gradients)
    ctx.dtypes = [each and each.dtype for each in kept]
    ctx.save_for_backward(
        *(tensor for each in kept for tensor in ((each.tensor, each.pending) if each else (None, None)))
    )


def _load(ctx: Any) -> list[Kept | None]:
    saved = ctx.saved_tensors
    return [
        dtype and Kept(tensor, dtype, None, pending)
        for dtype, tensor, pending in zip(ctx.dtypes, saved[0::2], saved[1::2])
    ]


def _finish(kept: Kept | None, upstream: Tensor | None, plan: Plan, *, in_place: bool) -> Tensor | None:
    """The gradient itself: tensor * pending * upstream, rounded once."""
    if kept is None:
        return None
    tensor = kept.tensor
    if kept.pending is None and upstream is None and tensor.dtype == kept.dtype:
        return tensor
    factor = torch.ones((), dtype=torch.promote_types(tensor.dtype, torch.float32), device=tensor.device)
    for part in (kept.pending, upstream):
        factor = factor if part is None else factor * part
    out = tensor if in_place and tensor.dtype == kept.dtype else torch.empty_like(tensor, dtype=kept.dtype)
    scale_into(out, tensor, factor, plan.backend)
    return out
