"""Check a call and run it in one of three ways: as an operator, as a row function, or densely.

The public functions call this module with one linear term. A head with adapters has several.

Shapes: N tokens, D_k features of term k, V classes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core.autodiff import in_transform
from lowtide.core.checks import check_tensors
from lowtide.core.torch_private import breaks_old_graphs
from lowtide.ops.linear_cross_entropy.definition import reference
from lowtide.ops.linear_cross_entropy.definition.head import (
    Arguments,
    Head,
    Labels,
    Options,
    scale_of,
)
from lowtide.ops.linear_cross_entropy.definition.validation import (
    check_arguments,
    check_class_target,
    check_head,
    check_ignore_index,
    check_loss,
)
from lowtide.ops.linear_cross_entropy.operator import (
    autograd,
    fake,  # noqa: F401  registers itself
    higher_order,
)


class LogProbs(NamedTuple):
    """Hold four float32 results per row (float64 for float64); ignored rows have 0, 0, 0, -1."""

    log_prob: Tensor
    """The target's log-probability: z_t - logsumexp(z)."""
    entropy: Tensor
    """The entropy of the distribution, in nats: - sum_v p_v log p_v."""
    logsumexp: Tensor
    """log sum_v exp(z_v)."""
    argmax: Tensor
    """The class with the largest logit, int64; of several such classes the first."""


@breaks_old_graphs
def cross_entropy(
    inputs: Sequence[Tensor],  # each [..., D_k]
    linear_weights: Sequence[Tensor],  # each [V, D_k]
    target: Tensor,  # [...] or [..., V]
    *,
    linear_bias: Tensor | None = None,
    **given: Any,
) -> Tensor:
    """Compute the loss; `given` are fields of `Arguments`."""
    arguments, input = Arguments(**given), inputs[0]
    check_arguments(inputs, linear_weights, target, linear_bias, arguments)
    check_loss(arguments, target, input, input.shape[:-1])
    head = Head(tuple(inputs), tuple(linear_weights), linear_bias, scale_of(arguments.logit_scale, input))
    return run(head, Labels.of(target, arguments, input), Options.of(input, arguments))


@breaks_old_graphs
def run(head: Head, labels: Labels, options: Options) -> Tensor:
    """Compute the loss of checked arguments by the operators, by the row function, or densely."""
    refuse_sharded_by_definition(head, labels, options)
    if head.by_position and 0 in head.weights[0].shape[:2] and not options.sharded:
        return reference.without_classes_or_positions(head, labels, options)
    by_definition = _by_definition(head, options)
    transformed = not by_definition and _unknown_to_operators(head, labels)
    if head.by_position and (by_definition or transformed or options.reduction == "none"):
        return higher_order.by_position(run, head, labels, options)
    if by_definition:
        loss = reference.linear_cross_entropy(head, labels, options)
    elif transformed:
        loss = higher_order.linear_cross_entropy(head, labels, options)
    else:
        loss = autograd.linear_cross_entropy(head, labels, options)
    target, class_weight = labels.target, labels.class_weight
    if target.is_floating_point():  # a product with probabilities has the wider of the two dtypes
        loss = loss.to(torch.promote_types(loss.dtype, target.dtype))
        loss = loss if class_weight is None else loss.to(torch.promote_types(loss.dtype, class_weight.dtype))
    return loss.view(head.leading) if options.reduction == "none" else loss


@breaks_old_graphs
def log_probs(
    inputs: Sequence[Tensor],  # each [..., D_k]
    linear_weights: Sequence[Tensor],  # each [V, D_k]
    target: Tensor,  # [...]
    *,
    linear_bias: Tensor | None = None,
    **given: Any,
) -> LogProbs:
    """Return the log-probabilities; `given` are fields of `Arguments`, without those of a loss."""
    arguments, input = Arguments(reduction="none", **given), inputs[0]
    check_tensors({"linear_weight": linear_weights[0]})
    check_head(linear_weights[0], sharded=arguments.shard is not None)
    check_arguments(inputs, linear_weights, target, linear_bias, arguments)
    check_class_target(target)
    check_ignore_index(arguments.ignore_index)
    head = Head(tuple(inputs), tuple(linear_weights), linear_bias, scale_of(arguments.logit_scale, input))
    options = Options.of(input, arguments)
    refuse_sharded_by_definition(head, Labels(target), options)
    if _by_definition(head, options):
        found: Sequence[Tensor] = reference.linear_log_probs(head, target, options)
    elif _unknown_to_operators(head, Labels(target)):
        found = higher_order.linear_log_probs(head, target, options)
    else:
        found = autograd.linear_log_probs(head, target, options)
    return LogProbs(*(each.view(head.leading) for each in found))


def refuse_sharded_by_definition(head: Head, labels: Labels, options: Options) -> None:
    """Raise for a sharded head that only the definition could compute."""
    named = options.backend == "reference" or head.device.type == "meta"
    if options.sharded and (named or _unknown_to_operators(head, labels)):
        autograd.refuse_sharded(options)


def _by_definition(head: Head, options: Options) -> bool:
    """Return True if the dense reference runs: it is asked for, or its logits take no memory.

    They take none if there are no classes, or if tensors have no data (meta tensors).
    """
    return (
        options.backend == "reference"
        or (head.classes == 0 and not options.sharded)
        or head.device.type == "meta"
    )


def _unknown_to_operators(head: Head, labels: Labels) -> bool:
    """Return True for a gradient of labels, or a transform, which the operators do not support."""
    if torch.is_grad_enabled() and any(each.requires_grad for each in labels.given):
        return True
    return in_transform(*head.tensors, *labels)
