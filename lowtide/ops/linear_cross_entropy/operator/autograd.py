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
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core import operator
from lowtide.core.autodiff import differentiable_gradients, is_differentiated, scatter_gradients
from lowtide.core.errors import ArgumentError
from lowtide.core.pending_gradient import finish_gradients
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.operator import higher_order, ops
from lowtide.ops.linear_cross_entropy.operator.arguments import call_of, parsed
from lowtide.ops.linear_cross_entropy.operator.planner import with_graph_facts
from lowtide.ops.linear_cross_entropy.planning.call import Call, backend_of
from lowtide.ops.linear_cross_entropy.ranks import messages


class OperatorPair(NamedTuple):
    """Hold an operator, the operator of its gradients, and what its derivatives depend on."""

    forward: Any
    backward: Any
    define: Callable[[Head, Labels, Options], tuple[Tensor, ...]]
    """Computes the results by the definition, so that any derivative follows."""
    labels: int
    """The number of labels that the operators take."""
    upstream: int
    """The number of results that may have an upstream gradient; they come first."""
    results: int
    """The number of results; what backward needs follows them."""


LOSS = OperatorPair(
    ops.linear_cross_entropy,
    ops.linear_cross_entropy_backward,
    lambda *call: (higher_order.linear_cross_entropy(*call),),
    labels=len(Labels._fields),
    upstream=1,
    results=1,
)
LOG_PROBS = OperatorPair(
    ops.linear_log_probs,
    ops.linear_log_probs_backward,
    lambda head, labels, options: higher_order.linear_log_probs(head, labels.target, options),
    labels=1,
    upstream=3,  # argmax has none
    results=4,
)


def is_by_row(pair: OperatorPair, options: Options) -> bool:
    """Return True if each row has results, and so an upstream gradient of its own."""
    return pair is LOG_PROBS or options.reduction == "none"


def linear_cross_entropy(head: Head, labels: Labels, options: Options) -> Tensor:
    """Run the loss operator; the result is [N] for none, else 0-d."""
    return _run(LOSS, head, labels, options)[0]


def linear_log_probs(head: Head, target: Tensor, options: Options) -> list[Tensor]:
    """Run the operator of log-probabilities; its four results are [N]."""
    return _run(LOG_PROBS, head, Labels(target), options)


def _run(pair: OperatorPair, head: Head, labels: Labels, options: Options) -> list[Tensor]:
    call = call_now(head, labels, options, log_probs=pair is LOG_PROBS)
    return operator.call(pair.forward, *_operands(pair, call, labels))[: pair.results]


def call_now(head: Head, labels: Labels, options: Options, *, log_probs: bool) -> Call:
    """Return a call with the gradients that it needs now, and the engine that runs it."""
    tracked = torch.is_grad_enabled()
    needs_grad = tuple(tracked and each is not None and each.requires_grad for each in head.tensors)
    return with_graph_facts(call_of(head, labels, needs_grad, options, log_probs=log_probs))


def _operands(pair: OperatorPair, call: Call, labels: Labels) -> tuple[Any, ...]:
    """Return the arguments of the pair's operators, from the head on."""
    return *call.head, *labels[: pair.labels], call.needs_grad.all, *call.options


def _backward(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    pair, options = ctx.pair, ctx.options
    grad_output = gradients[: pair.upstream]
    waits = options.group and is_by_row(pair, options)  # for the backward of other ranks
    if all(each is None for each in grad_output) and not waits:
        return _arguments(ctx, (None,) * len(ctx.needs_grad))
    tells = waits and not torch.compiler.is_compiling()
    with messages.telling_errors(options.group) if tells else contextlib.nullcontext():
        return _arguments(ctx, _gradients(ctx, grad_output))


def _gradients(ctx: Any, grad_output: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    _refuse_others(ctx)
    call, labels, rest = _saved(ctx)
    if is_differentiated(*grad_output):
        return differentiated(ctx.pair, call, labels, grad_output)
    if is_by_row(ctx.pair, ctx.options):
        return by_operator(ctx.pair, call, labels, rest, grad_output)
    backend = backend_of(ctx.options.engine)
    return finish_gradients(rest, grad_output[0], call.head.tensors, ctx.needs_grad, backend)


def differentiated(
    pair: OperatorPair, call: Call, labels: Labels, grad_output: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Return gradients of the head's tensors that can be differentiated again."""
    head, options = call.head, call.options
    refuse_sharded(options)
    results = lambda tensors: pair.define(head.of(tensors), labels, options)  # noqa: E731
    return differentiable_gradients(results, head.tensors, call.needs_grad.all, grad_output)


def by_operator(
    pair: OperatorPair,
    call: Call,
    labels: Labels,
    statistics: Sequence[Tensor],
    grad_output: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the head's tensors by the operator, from each row's statistics."""
    found = operator.call(pair.backward, *grad_output, statistics, *_operands(pair, call, labels))
    return scatter_gradients(found, call.needs_grad.all)


# Convert between the schema's arguments and Head and Options, and place each gradient.


def _save(pair: OperatorPair, ctx: Any, inputs: Sequence[Any], output: Sequence[Tensor]) -> None:
    """Save the call for backward."""
    call, labels = parsed(inputs, log_probs=pair is LOG_PROBS)
    ctx.pair, ctx.options, ctx.call_kind = pair, call.options, call.call_kind
    ctx.needs_grad, ctx.terms = call.needs_grad.all, len(call.head.inputs)
    ctx.set_materialize_grads(False)
    if any(ctx.needs_grad):
        ctx.save_for_backward(*call.head.tensors, *labels[: pair.labels], *output[pair.results :])


def _saved(ctx: Any) -> tuple[Call, Labels, list[Tensor]]:
    """Return the call, its labels, and the tensors that forward kept."""
    terms, count, saved = ctx.terms, len(ctx.needs_grad), ctx.saved_tensors  # each read unpacks
    tensors, rest, labels = saved[:count], saved[count:], ctx.pair.labels
    head = Head(tensors[:terms], tensors[terms : 2 * terms], *tensors[2 * terms :])
    # The kept tensors are outputs; undetached they would lead back to this node.
    call = Call(head, ctx.options, ctx.call_kind)
    return call, Labels(*rest[:labels]), [each.detach() for each in rest[labels:]]


def _arguments(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Return a gradient or None for each argument of the schema."""
    terms, others = ctx.terms, ctx.pair.labels + 1 + len(ctx.options)
    weights = gradients[terms : 2 * terms]
    return (list(gradients[:terms]), list(weights), *gradients[2 * terms :], *(None,) * others)


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
    inputs, weights, *others = ctx.needs_input_grad[: 4 + ctx.pair.labels]
    needed, formed = (*inputs, *weights, *others), (*ctx.needs_grad, *(False,) * ctx.pair.labels)
    if needed != formed and any(need and not grad for need, grad in zip(needed, formed)):
        raise RuntimeError(
            "this graph was exported where a tensor that needs a gradient now needed none; "
            "export it with gradients enabled, where all that will be trained requires one"
        )


for _pair in (LOSS, LOG_PROBS):
    operator.derivative(_pair.forward, _backward, setup_context=functools.partial(_save, _pair))
