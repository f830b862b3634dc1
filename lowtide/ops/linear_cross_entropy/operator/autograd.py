"""Register the derivatives of the operators.

What backward needs depends on the reduction:

mean, sum   One number multiplies every row's gradient, so forward forms the gradients while it
            holds each chunk of logits (three products in all). Backward multiplies them by the
            upstream gradient: in place where the graph is freed behind it, out of place where the
            caller retains it.
none, and   Every row has its own upstream gradient. Forward keeps two or three numbers a row,
log_probs   backward computes the logits again (four products).

A backward that is itself differentiated, or batched, runs higher_order.py from the saved inputs.

Shapes: N tokens, D_k features of term k, V classes.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.autodiff import differentiable_gradients, is_differentiated, scatter_gradients
from lowtide.core.errors import ArgumentError
from lowtide.core.operator import call, derivative
from lowtide.core.pending_gradient import finish_gradients
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator import higher_order, ops
from lowtide.ops.linear_cross_entropy.operator.planner import with_graph_facts
from lowtide.ops.linear_cross_entropy.planning.call import backend_of
from lowtide.ops.linear_cross_entropy.ranks import messages


def linear_cross_entropy(head: Head, labels: Labels, options: Options) -> Tensor:
    """Run the loss operator; the result is [N] for none, else 0-d."""
    needs_grad = _needs_grad(head)
    call_kind = ops.call_kind_of(head, labels.target, labels.class_weight, needs_grad, log_probs=False)
    options = with_graph_facts(head, options, call_kind)
    loss, *_ = call(ops.linear_cross_entropy, *head, *labels, needs_grad, *options)
    return loss


def linear_log_probs(head: Head, target: Tensor, options: Options) -> tuple[Tensor, ...]:
    """Run the operator of log-probabilities; its four results are [N]."""
    needs_grad = _needs_grad(head)
    options = with_graph_facts(
        head, options, ops.call_kind_of(head, target, None, needs_grad, log_probs=True)
    )
    log_prob_N, entropy_N, logsumexp_N, argmax_N, *_ = call(
        ops.linear_log_probs, *head, target, needs_grad, *options
    )
    return log_prob_N, entropy_N, logsumexp_N, argmax_N


def _needs_grad(head: Head) -> tuple[bool, ...]:
    tracked = torch.is_grad_enabled()
    return tuple(tracked and each is not None and each.requires_grad for each in head.tensors)


def _save_loss(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    _save(ctx, ops.parsed(inputs), output[1:])


def _loss_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    grad_output = gradients[0]
    waits = ctx.options.reduction == "none" and ctx.options.group  # for the backward of other ranks
    if grad_output is None and not waits:
        return _arguments(ctx, (None,) * len(ctx.needs_grad))
    with _telling_errors(ctx) if waits else contextlib.nullcontext():
        return _gradients_of_loss(ctx, grad_output)


def _gradients_of_loss(ctx: Any, grad_output: Tensor | None) -> tuple[Any, ...]:
    options, needs_grad = ctx.options, ctx.needs_grad
    _refuse_others(ctx)
    head, labels, rest = _saved(ctx)
    differentiated = differentiated_loss(head, labels, options, needs_grad, grad_output)
    if differentiated is not None:
        return _arguments(ctx, differentiated)
    if options.reduction == "none":
        return _arguments(ctx, of_row_losses(head, labels, options, needs_grad, rest, grad_output))
    backend = backend_of(options.engine)
    return _arguments(ctx, finish_gradients(rest, grad_output, head.tensors, needs_grad, backend))


def differentiated_loss(
    head: Head, labels: Labels, options: Options, needs_grad: tuple[bool, ...], grad_output: Tensor | None
) -> tuple[Tensor | None, ...] | None:
    """Return gradients that can be differentiated again, where backward is; else None."""
    if not is_differentiated(grad_output):
        return None
    refuse_sharded(options)

    def losses(own: list[Any]) -> tuple[Tensor, ...]:
        return (higher_order.linear_cross_entropy(head.of(own), labels, options),)

    return differentiable_gradients(losses, head.tensors, needs_grad, (grad_output,))


def of_row_losses(
    head: Head,
    labels: Labels,
    options: Options,
    needs_grad: tuple[bool, ...],
    statistics: Sequence[Tensor],
    grad_output: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients by the operator, in the order of the head's tensors."""
    found = call(
        ops.linear_cross_entropy_backward, grad_output, statistics, *head, *labels, needs_grad, *options
    )
    return scatter_gradients(found, needs_grad)


def _save_log_probs(ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    _save(ctx, ops.parsed(inputs, log_probs=True), output[4:], labels=1)


def _log_probs_gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    if all(each is None for each in gradients[:3]) and not ctx.options.group:
        return _arguments(ctx, (None,) * len(ctx.needs_grad))
    with _telling_errors(ctx):
        return _gradients_of_log_probs(ctx, gradients[:3])


def _gradients_of_log_probs(ctx: Any, grad_output: Sequence[Tensor | None]) -> tuple[Any, ...]:
    options, needs_grad = ctx.options, ctx.needs_grad
    _refuse_others(ctx)
    head, (target, *_), statistics = _saved(ctx)
    differentiated = differentiated_log_probs(head, target, options, needs_grad, grad_output)
    if differentiated is not None:
        return _arguments(ctx, differentiated)
    return _arguments(ctx, of_row_log_probs(head, target, options, needs_grad, statistics, grad_output))


def differentiated_log_probs(
    head: Head,
    target: Tensor,
    options: Options,
    needs_grad: tuple[bool, ...],
    grad_output: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...] | None:
    """Return gradients that can be differentiated again, where backward is; else None."""
    if not is_differentiated(*grad_output):
        return None
    refuse_sharded(options)

    def log_probs(own: list[Any]) -> tuple[Tensor, ...]:
        return higher_order.linear_log_probs(head.of(own), target, options)

    return differentiable_gradients(log_probs, head.tensors, needs_grad, grad_output)


def of_row_log_probs(
    head: Head,
    target: Tensor,
    options: Options,
    needs_grad: tuple[bool, ...],
    statistics: Sequence[Tensor],
    grad_output: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients by the operator, in the order of the head's tensors."""
    found = call(ops.linear_log_probs_backward, *grad_output, statistics, *head, target, needs_grad, *options)
    return scatter_gradients(found, needs_grad)


derivative(ops.linear_cross_entropy, _loss_gradients, setup_context=_save_loss)
derivative(ops.linear_log_probs, _log_probs_gradients, setup_context=_save_log_probs)


# Convert between the schema's arguments and Head and Options, and place each gradient.


def _save(
    ctx: Any,
    call: tuple[Head, Labels, tuple[bool, ...], Options],
    rest: Sequence[Tensor],
    labels: int = len(Labels._fields),
) -> None:
    """Save the call for backward; the operator takes the first `labels` of its labels."""
    head, own, ctx.needs_grad, ctx.options = call
    ctx.terms, ctx.labels = len(head.inputs), labels
    ctx.set_materialize_grads(False)
    if any(ctx.needs_grad):
        ctx.save_for_backward(*head.tensors, *own[:labels], *rest)


def _saved(ctx: Any) -> tuple[Head, Labels, list[Tensor]]:
    """Return the head, its labels, and the tensors that forward kept."""
    terms, count, saved = ctx.terms, len(ctx.needs_grad), ctx.saved_tensors  # each read unpacks
    tensors, rest = saved[:count], saved[count:]
    head = Head(tensors[:terms], tensors[terms : 2 * terms], *tensors[2 * terms :])
    # The kept tensors are outputs; undetached they would lead back to this node.
    return head, Labels(*rest[: ctx.labels]), [each.detach() for each in rest[ctx.labels :]]


def _arguments(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return a gradient or None for each argument of the schema."""
    terms, others = ctx.terms, ctx.labels + 1 + len(ctx.options)
    weights = gradients[terms : 2 * terms]
    return (list(gradients[:terms]), list(weights), *gradients[2 * terms :], *(None,) * others)


def _telling_errors(ctx: Any) -> contextlib.AbstractContextManager[None]:
    """Tell the ranks of a sharded head, each waiting in its backward, of an error in this one."""
    if not ctx.options.group or torch.compiler.is_compiling():
        return contextlib.nullcontext()
    return messages.telling_errors(ctx.options.group)


def refuse_sharded(options: Options) -> None:
    """Raise for a sharded head where the definition would have to run."""
    if options.sharded:
        raise ArgumentError(
            "a head whose classes are divided over ranks, or into segments, has first derivatives by "
            "backward alone: no create_graph=True, vmap, forward mode, torch.func, gradients of target or "
            "weight, meta tensors or backend='reference'; for these, gather the weight, and call without "
            "group and segments"
        )


def _refuse_others(ctx: Any) -> None:
    inputs, weights, *others = ctx.needs_input_grad[: 4 + ctx.labels]
    needed, formed = (*inputs, *weights, *others), (*ctx.needs_grad, *(False,) * ctx.labels)
    if needed != formed and any(need and not grad for need, grad in zip(needed, formed)):
        raise RuntimeError(
            "this graph was exported where a tensor that needs a gradient now needed none; "
            "export it with gradients enabled, where all that will be trained requires one"
        )
