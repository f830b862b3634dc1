"""The derivatives of the operators. What backward needs depends on the reduction:

mean, sum   One number multiplies every row's gradient, so forward forms the gradients while it holds each
            chunk of logits (three products in all). Backward multiplies them by the upstream gradient: in
            place where the graph is freed behind it, out of place where the caller retains it.
none, and   Every row has its own upstream gradient. Forward keeps two numbers a row, backward computes the
log_probs   logits again (four products).

A backward that is itself to be differentiated, or is batched, goes the transforms' way, from the saved
inputs.

Shapes: N tokens, D_k features of term k, V classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import ops, shapes, transforms  # noqa: F401  shapes registers itself
from lowtide.linear_cross_entropy.head import Head, Options
from lowtide.linear_cross_entropy.plan import choose_backend
from lowtide.linear_cross_entropy.scaling import scaled

Gradients = tuple[Tensor | None, ...]


def linear_cross_entropy(head: Head, target: Tensor, class_weight: Tensor | None, options: Options) -> Tensor:
    """[N] for none, else 0-d."""
    terms = len(head.inputs)
    return _LinearCrossEntropy.apply(options, _wanted(head), terms, target, class_weight, *head.tensors)


def linear_log_probs(head: Head, target: Tensor, options: Options) -> tuple[Tensor, ...]:
    """Four times [N]."""
    return _LogProbs.apply(options, _wanted(head), len(head.inputs), target, *head.tensors)


def _wanted(head: Head) -> tuple[bool, ...]:
    tracked = torch.is_grad_enabled()
    return tuple(tracked and each is not None and each.requires_grad for each in head.tensors)


def _head(terms: int, tensors: Sequence[Any]) -> Head:
    return Head(tuple(tensors[:terms]), tuple(tensors[terms : 2 * terms]), *tensors[2 * terms :])


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        wanted: tuple[bool, ...],
        terms: int,
        target: Tensor,
        class_weight: Tensor | None,
        *tensors: Tensor | None,
    ) -> Tensor:
        head = _head(terms, tensors)
        loss, *rest = ops.linear_cross_entropy(*head, target, class_weight, wanted, *options)
        ctx.options, ctx.wanted, ctx.terms = options, wanted, terms
        ctx.set_materialize_grads(False)
        if any(wanted):
            ctx.save_for_backward(target, class_weight, *tensors, *rest)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor | None) -> Gradients:  # type: ignore[override]
        options, wanted = ctx.options, ctx.wanted
        if upstream is None:
            return (None,) * (5 + len(wanted))
        target, class_weight, *tensors = ctx.saved_tensors
        tensors, rest = tensors[: len(wanted)], tensors[len(wanted) :]
        head = _head(ctx.terms, tensors)
        if _is_differentiated(upstream):

            def losses(head: Head) -> tuple[Tensor, ...]:
                return (transforms.linear_cross_entropy(head, target, class_weight, options),)

            gradients = _again(losses, head, wanted, (upstream,))
        elif options.reduction == "none":
            found = ops.linear_cross_entropy_backward(
                upstream, rest, *head, target, class_weight, wanted, *options
            )
            gradients = _placed(found, wanted)
        else:
            waiting = iter(rest)
            gradients = tuple(
                _finished(next(waiting), next(waiting) * upstream, like, options) if grad else None
                for like, grad in zip(tensors, wanted)
            )
        return (None,) * 5 + gradients


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        options: Options,
        wanted: tuple[bool, ...],
        terms: int,
        target: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        head = _head(terms, tensors)
        log_prob_N, entropy_N, logsumexp_N, argmax_N, *statistics = ops.linear_log_probs(
            *head, target, wanted, *options
        )
        ctx.options, ctx.wanted, ctx.terms = options, wanted, terms
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(argmax_N)
        if any(wanted):
            ctx.save_for_backward(target, *tensors, *statistics)
        return log_prob_N, entropy_N, logsumexp_N, argmax_N

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Gradients:
        given = upstream[:3]
        if all(each is None for each in given):
            return (None,) * (4 + len(ctx.wanted))
        options, count = ctx.options, len(ctx.wanted)
        target, *tensors = ctx.saved_tensors
        tensors, statistics = tensors[:count], tensors[count:]
        head = _head(ctx.terms, tensors)
        if _is_differentiated(*given):

            def log_probs(head: Head) -> tuple[Tensor, ...]:
                return transforms.linear_log_probs(head, target, options)

            return (None,) * 4 + _again(log_probs, head, ctx.wanted, given)
        found = ops.linear_log_probs_backward(*given, statistics, *head, target, ctx.wanted, *options)
        return (None,) * 4 + _placed(found, ctx.wanted)


def _is_differentiated(*upstream: Tensor | None) -> bool:
    """Whether backward is to be differentiated (create_graph), or its upstream gradients are batched."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or transforms.active(*upstream))


def _again(
    function: Callable[[Head], tuple[Tensor, ...]],
    head: Head,
    wanted: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> Gradients:
    """The gradients of function(head), so that they can be differentiated."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of their own: one tensor may be an input and a weight at once.
        own = [each if each is None else each.view_as(each) for each in head.tensors]
        outputs = function(head.of(own))
        used = [(out, gradient) for out, gradient in zip(outputs, upstream) if gradient is not None]
        found = torch.autograd.grad(
            [out for out, _ in used],
            [each for each, grad in zip(own, wanted) if grad],
            [gradient for _, gradient in used],
            create_graph=create_graph,
        )
    return _placed(found, wanted)


def _placed(found: Sequence[Tensor], wanted: Sequence[bool]) -> Gradients:
    each = iter(found)
    return tuple(next(each) if grad else None for grad in wanted)


def _finished(kept: Tensor, factor: Tensor, like: Tensor, options: Options) -> Tensor:
    """The gradient itself: kept * factor, rounded once."""
    if torch.compiler.is_compiling():
        return (kept.to(factor.dtype) * factor).to(like.dtype).view(like.shape)
    # A freed graph's tensors are ours to change; a retained one's will be read again.
    in_place = not torch._C._autograd._get_current_graph_task_keep_graph()
    backend = choose_backend(options.backend, like.device, options.sum_dtype)
    return scaled(kept, factor, like.dtype, backend, in_place=in_place).view(like.shape)
