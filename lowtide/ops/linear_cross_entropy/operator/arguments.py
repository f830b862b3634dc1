"""Define the arguments of the operators: their schema, and what they are made of.

Each operator takes a head, labels (for log-probabilities the target alone), which gradients of the
head's tensors are wanted, and options.
"""

from collections.abc import Sequence
from typing import Any

from lowtide.core.operator import schema_of
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options
from lowtide.ops.linear_cross_entropy.planning.call import Call, CallKind, NeedsGrad

HEAD, LABELS = schema_of(Head), schema_of(Labels)
OPTIONS = f"bool[] needs_grad, {schema_of(Options)}"


def parts_of(
    arguments: Sequence[Any], *, log_probs: bool = False
) -> tuple[Head, Labels, Sequence[bool], Options]:
    """Return the parts of an operator's arguments, from the head on.

    Shapes may stand in the place of tensors.
    """
    inputs, weights, bias, scale, *rest = arguments
    head, count = Head(tuple(inputs), tuple(weights), bias, scale), 1 if log_probs else len(Labels._fields)
    return head, Labels(*rest[:count]), rest[count], Options(*rest[count + 1 :])


def parsed(arguments: Sequence[Any], *, log_probs: bool = False) -> tuple[Call, Labels]:
    """Return the call and the labels that an operator's arguments, from the head on, stand for."""
    head, labels, needs_grad, options = parts_of(arguments, log_probs=log_probs)
    return call_of(head, labels, needs_grad, options, log_probs=log_probs), labels


def call_of(
    head: Head, labels: Labels, needs_grad: Sequence[bool], options: Options, *, log_probs: bool
) -> Call:
    """Return the call of a head; `needs_grad` says which of its tensors get a gradient."""
    terms, target = len(head.inputs), labels.target
    gradients = NeedsGrad(
        tuple(needs_grad[:terms]), tuple(needs_grad[terms : 2 * terms]), *needs_grad[2 * terms :]
    )
    soft_dtype = target.dtype if target.is_floating_point() else None
    return Call(head, options, CallKind(gradients, log_probs, soft_dtype, labels.class_weight is not None))
