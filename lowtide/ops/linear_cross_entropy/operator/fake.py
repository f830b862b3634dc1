"""Compute what is known of the operators without running them.

These are the shapes and dtypes of their outputs, their FLOPs, and the bytes that they hold. torch
gets the first two by registered functions.

Shapes: N tokens, D_k features of term k, V classes.
"""

import functools
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
from lowtide.ops.linear_cross_entropy.engines.gradients import keeps_input_sum, unwritten
from lowtide.ops.linear_cross_entropy.engines.saved_stats import saves_target_logit, with_engine
from lowtide.ops.linear_cross_entropy.operator.arguments import parsed, parts_of
from lowtide.ops.linear_cross_entropy.operator.planner import peak_bytes, weight_gradient_of, with_graph_facts
from lowtide.ops.linear_cross_entropy.operator.positions import PositionGradients, widened
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.call_memory import position_bytes
from lowtide.ops.linear_cross_entropy.planning.operands import follows_columns


def _vector(head: Head, options: Options) -> Tensor:
    return head.inputs[0].new_empty(head.tokens, dtype=options.sum_dtype)


def _statistics(head: Head, options: Options, count: int) -> list[Tensor]:
    count += saves_target_logit(options)
    first, *others = (_vector(head, options) for _ in range(count))
    number = [torch.empty(1, dtype=torch.long, device="cpu")] * bool(options.group)
    return [with_engine(first, options.engine), *others, *number]


@register_fake("lowtide::linear_cross_entropy")
def _(*arguments: Any) -> list[Tensor]:
    call, _ = parsed(arguments)
    head, options, needs_grad, sum_dtype = call.head, call.options, call.needs_grad, call.options.sum_dtype
    if options.reduction == "none":
        # The loss; then each row's maximum and sum, and for probabilities their mass.
        return [_vector(head, options), *_statistics(head, options, 2 + call.call_kind.probabilities)]
    outputs, terms = [head.inputs[0].new_empty((), dtype=sum_dtype)], len(head.inputs)
    if head.by_position:
        return outputs + PositionGradients(head, needs_grad, sum_dtype).gradients.outputs
    way = weight_gradient_of(call) if any(needs_grad.weights) else None
    for place, (like, grad) in enumerate(zip(head.tensors, needs_grad.all)):
        if like is None or not grad:
            continue
        of_input, of_term = place < terms, place < 2 * terms
        summed = keeps_input_sum(like, options) if of_input else place != terms or way == "accumulate"
        by_row = options.engine == "exponentials" and of_term and (of_input or way != "class_blocks")
        shape = (head.tokens, like.shape[-1]) if of_input else like.shape
        by_columns = terms <= place < 2 * terms and follows_columns(like, options)
        kept: dict[str, Any] = {"summed": summed, "by_row": by_row, "by_columns": by_columns}
        outputs += unwritten(like, shape, sum_dtype=sum_dtype, **kept)
    return outputs


@register_fake("lowtide::linear_log_probs")
def _(*arguments: Any) -> list[Tensor]:
    head, _, _, options = parts_of(arguments, log_probs=True)
    argmax_N = head.inputs[0].new_empty(head.tokens, dtype=torch.long)
    # log_prob, entropy, logsumexp; argmax; then each row's maximum, sum and mean.
    return [*(_vector(head, options) for _ in range(3)), argmax_N, *_statistics(head, options, 3)]


# The place of a head's first argument among each operator's arguments.
_HEAD = {
    "lowtide::linear_cross_entropy": 0,
    "lowtide::linear_cross_entropy_backward": 2,
    "lowtide::linear_log_probs": 0,
    "lowtide::linear_log_probs_backward": 4,
}


def _call_of(operator: str, arguments: Sequence[Any]) -> Call:
    return parsed(arguments[_HEAD[operator] :], log_probs="log_probs" in operator)[0]


def _fake_gradients(operator: str, *arguments: Any) -> list[Tensor]:
    call = _call_of(operator, arguments)

    def gradient(place: int, like: Tensor) -> Tensor:
        of_weight = len(call.head.inputs) <= place < 2 * len(call.head.inputs)
        if of_weight and follows_columns(like, call.options):
            return like.new_empty(like.shape[::-1]).t()
        return like.new_empty(like.shape)

    wanted = enumerate(zip(call.head.tensors, call.needs_grad.all))
    return [gradient(place, like) for place, (like, grad) in wanted if grad and like is not None]


def _flops(operator: str, *arguments: Any, **_out: Any) -> int:
    """Count the FLOPs of the logits, and of the gradients of inputs and weights that are formed."""
    log_probs = "log_probs" in operator
    parts = parts_of(arguments[_HEAD[operator] :], log_probs=log_probs)
    (inputs, weights, *_), _, needs_grad, options = parts
    forms = operator.endswith("_backward") or not (log_probs or options.reduction == "none")
    terms, total = len(inputs), 0
    for k, (input, weight) in enumerate(zip(inputs, weights)):  # shapes in the place of tensors
        formed = needs_grad[k] + needs_grad[terms + k] if forms else 0
        total += 2 * math.prod(input[:-1]) * math.prod(weight) * (1 + formed)
    return total


for _name in _HEAD:
    _overloads = getattr(torch.ops.lowtide, _name.partition("::")[2])
    register_flop_formula(_overloads)(functools.partial(_flops, _name))
    if _name.endswith("_backward"):
        register_fake(_name)(functools.partial(_fake_gradients, _name))


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
    call = _call_of(operator, arguments)
    if not call.head.by_position:
        return peak_bytes(call)
    of_all = call.head, call.needs_grad.all, call.options.sum_dtype
    parts = widened(*of_all).at_positions()
    return position_bytes(*of_all) + max(peak_bytes(call._replace(head=part)) for part in parts)


def with_new_graph_facts(operator: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments with the engine and the other graph facts chosen for these tensors.

    The facts among the arguments may have been chosen for tensors on another device. The workspace
    that the caller asked for is kept.
    """
    call = _call_of(operator, arguments)
    return (*arguments[: -len(call.options)], *with_graph_facts(call).options)
