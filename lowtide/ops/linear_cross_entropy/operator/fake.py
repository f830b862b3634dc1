"""Compute what is known of the operators without running them.

These are the shapes and dtypes of their outputs, their FLOPs, and the bytes that they hold. torch
gets the first two by registered functions.

Shapes: N tokens, D_k features of term k, V classes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import register_fake
from torch.utils._pytree import tree_map_only

from lowtide.core.flop_formula import register_flop_formula
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.engines.gradients import factor_remains, keeps_input_sum
from lowtide.ops.linear_cross_entropy.engines.saved_stats import saves_target_logit, with_engine
from lowtide.ops.linear_cross_entropy.operator.ops import call_kind_of, parsed
from lowtide.ops.linear_cross_entropy.operator.planner import peak_bytes, weight_gradient_of, with_graph_facts
from lowtide.ops.linear_cross_entropy.operator.positions import kept_dtype, widened
from lowtide.ops.linear_cross_entropy.planning.call import CallKind
from lowtide.ops.linear_cross_entropy.planning.call_memory import position_bytes


def _vector(head: Head, options: Options) -> Tensor:
    return head.inputs[0].new_empty(head.tokens, dtype=options.sum_dtype)


def _statistics(head: Head, options: Options, count: int) -> list[Tensor]:
    count += saves_target_logit(options)
    first, *others = (_vector(head, options) for _ in range(count))
    number = [torch.empty(1, dtype=torch.long, device="cpu")] * bool(options.group)
    return [with_engine(first, options.engine), *others, *number]


@register_fake("lowtide::linear_cross_entropy")
def _(*arguments: Any) -> list[Tensor]:
    head, labels, needs_grad, options = parsed(arguments)
    call_kind = call_kind_of(head, labels.target, labels.class_weight, needs_grad, log_probs=False)
    if options.reduction == "none":
        # The loss; then each row's maximum and sum, and for probabilities their mass.
        return [_vector(head, options), *_statistics(head, options, 2 + call_kind.probabilities)]
    number = head.inputs[0].new_empty((), dtype=options.sum_dtype)
    waiting, terms, sum_dtype = [], len(head.inputs), options.sum_dtype
    way = None
    if any(call_kind.needs_grad.weights) and not head.by_position:
        way = weight_gradient_of(head, options, call_kind)
    for place, (like, grad) in enumerate(zip(head.tensors, needs_grad)):
        if like is None or not grad:
            continue
        shape = (head.tokens, like.shape[-1]) if place < terms else like.shape
        if head.by_position:
            dtype, remains = kept_dtype(place, like.dtype, sum_dtype), False
        else:
            rounded = place < terms and not keeps_input_sum(like, options)
            rounded = rounded or (place == terms and way != "accumulate")
            dtype = like.dtype if rounded else sum_dtype
            by_row = options.engine == "exponentials" and place < 2 * terms
            by_row = by_row and (place < terms or way != "class_blocks")
            remains = factor_remains(like.dtype, dtype, sum_dtype, by_row=by_row)
        tensor = like.new_empty(shape, dtype=dtype)
        waiting += [tensor, torch.empty_like(number) if remains else tensor.new_empty(0)]
    return [number, *waiting]


@register_fake("lowtide::linear_cross_entropy_backward")
def _(_grad_output: Any, _statistics: Any, *arguments: Any) -> list[Tensor]:
    head, _, needs_grad, _ = parsed(arguments)
    return _fake_gradients(head.tensors, needs_grad)


@register_fake("lowtide::linear_log_probs")
def _(*arguments: Any) -> list[Tensor]:
    head, _, _, options = parsed(arguments, log_probs=True)
    argmax_N = head.inputs[0].new_empty(head.tokens, dtype=torch.long)
    # log_prob, entropy, logsumexp; argmax; then each row's maximum, sum and mean.
    return [
        *(_vector(head, options) for _ in range(3)),
        argmax_N,
        *_statistics(head, options, 3),
    ]


@register_fake("lowtide::linear_log_probs_backward")
def _(*arguments: Any) -> list[Tensor]:
    head, _, needs_grad, _ = parsed(arguments[4:], log_probs=True)
    return _fake_gradients(head.tensors, needs_grad)


def _fake_gradients(tensors: Sequence[Any], needs_grad: Sequence[bool]) -> list[Tensor]:
    return [like.new_empty(like.shape) for like, grad in zip(tensors, needs_grad) if grad]


def _products(inputs: Sequence[Any], weights: Sequence[Any], needs_grad: Sequence[bool]) -> int:
    """Count the FLOPs of the logits and of the wanted gradients of inputs and weights."""
    terms, total = len(inputs), 0
    for k, (input, weight) in enumerate(zip(inputs, weights)):
        tokens = math.prod(input[:-1])
        total += 2 * tokens * math.prod(weight) * (1 + needs_grad[k] + needs_grad[terms + k])
    return total


@register_flop_formula(torch.ops.lowtide.linear_cross_entropy)
def _(*arguments: Any, **_out: Any) -> int:
    (inputs, weights, *_), _, needs_grad, options = parsed(arguments)
    return _products(inputs, weights, [grad and options.reduction != "none" for grad in needs_grad])


@register_flop_formula(torch.ops.lowtide.linear_cross_entropy_backward)
def _(_grad_output: Any, _statistics: Any, *arguments: Any, **_out: Any) -> int:
    (inputs, weights, *_), _, needs_grad, _ = parsed(arguments)
    return _products(inputs, weights, needs_grad)


@register_flop_formula(torch.ops.lowtide.linear_log_probs)
def _(*arguments: Any, **_out: Any) -> int:
    inputs, weights, *_ = arguments
    return _products(inputs, weights, [False] * 2 * len(inputs))


@register_flop_formula(torch.ops.lowtide.linear_log_probs_backward)
def _(*arguments: Any, **_out: Any) -> int:
    (inputs, weights, *_), _, needs_grad, _ = parsed(arguments[4:], log_probs=True)
    return _products(inputs, weights, needs_grad)


# The index of a head's first argument in each operator's arguments.
_HEAD = {
    "lowtide::linear_cross_entropy": 0,
    "lowtide::linear_cross_entropy_backward": 2,
    "lowtide::linear_log_probs": 0,
    "lowtide::linear_log_probs_backward": 4,
}


def moved_call(
    operator: OpOverload, arguments: Sequence[Any], move: Callable[[Tensor], Tensor]
) -> tuple[list[Tensor], int] | None:
    """Run an operator on tensors that `move` returns; return its outputs and the bytes it holds.

    The call is planned again for these tensors, which may be fake. Return None if the operator is
    not one of the loss.
    """
    name = operator.name()
    if name not in _HEAD:
        return None
    moved = with_new_graph_facts(name, tree_map_only(Tensor, move, tuple(arguments)))
    return operator(*moved), workspace_of(name, moved)


def workspace_of(operator: str, arguments: Sequence[Any]) -> int:
    """Return the bytes that a call holds beyond its arguments and results."""
    head, options, call_kind = _parsed(operator, arguments)
    if not head.by_position:
        return peak_bytes(head, options, call_kind)
    wide = widened(head, call_kind.needs_grad.all, options.sum_dtype)
    beside = position_bytes(head, call_kind.needs_grad.all, options.sum_dtype)
    return beside + max(peak_bytes(part, options, call_kind) for part in wide.at_positions())


def with_new_graph_facts(operator: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with the engine and the other graph facts chosen for these tensors.

    The facts among the arguments may have been chosen for tensors on another device. The workspace
    that the caller asked for is kept.
    """
    head, options, call_kind = _parsed(operator, arguments)
    return (*arguments[: -len(options)], *with_graph_facts(head, options, call_kind))


def _parsed(operator: str, arguments: Sequence[Any]) -> tuple[Head, Options, CallKind]:
    log_probs = "log_probs" in operator
    head, (target, weight, *_), needs_grad, options = parsed(
        arguments[_HEAD[operator] :], log_probs=log_probs
    )
    return head, options, call_kind_of(head, target, weight, needs_grad, log_probs=log_probs)
