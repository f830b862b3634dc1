"""Define the arguments of the operators: their schema, and what they are made of.

Each operator takes a head, labels (for log-probabilities the target alone), which gradients of the
head's tensors are wanted, and options.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lowtide.core.operator import schema_of
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.planning.call import CallKind, NeedsGrad

HEAD, LABELS = schema_of(Head), schema_of(Labels)
OPTIONS = f"bool[] needs_grad, {schema_of(Options)}"

ParsedCall = tuple[Head, Labels, tuple[bool, ...], Options]


def parsed(arguments: Sequence[Any], *, log_probs: bool = False) -> ParsedCall:
    """Parse an operator's arguments, from the head on: head, labels, needs_grad, options."""
    inputs, weights, bias, scale, *rest = arguments
    head, count = Head(tuple(inputs), tuple(weights), bias, scale), 1 if log_probs else len(Labels._fields)
    return head, Labels(*rest[:count]), tuple(rest[count]), Options(*rest[count + 1 :])


def call_kind_of(
    head: Head, target: Tensor, class_weight: Tensor | None, needs_grad: Sequence[bool], *, log_probs: bool
) -> CallKind:
    terms = len(head.inputs)
    gradients = NeedsGrad(
        tuple(needs_grad[:terms]), tuple(needs_grad[terms : 2 * terms]), *needs_grad[2 * terms :]
    )
    soft_dtype = target.dtype if target.is_floating_point() else None
    return CallKind(gradients, log_probs, soft_dtype, class_weight is not None)
