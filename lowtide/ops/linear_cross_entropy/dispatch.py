"""Check a call and run it in one of three ways: as an operator, as a row function, or densely.

The public functions call this module with one linear term. A head with adapters has several.

Shapes: N tokens, D_k features of term k, V classes.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core.autodiff import in_shape, in_transform
from lowtide.core.torch_private import breaks_old_graphs
from lowtide.ops.linear_cross_entropy.definition import reference
from lowtide.ops.linear_cross_entropy.definition.head import Arguments, Head, Labels, Options, scale_of
from lowtide.ops.linear_cross_entropy.definition.validation import (
    check_arguments,
    check_log_probs,
    check_loss,
)
from lowtide.ops.linear_cross_entropy.operator import (
    autograd,
    fake,  # noqa: F401  registers itself
    higher_order,
)
from lowtide.ops.linear_cross_entropy.planning.operands import with_aligned_operands


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
    way = way_of(head, labels, options)
    if head.by_position and 0 in head.weights[0].shape[:2] and not options.sharded:
        return reference.without_classes_or_positions(head, labels, options)
    if head.by_position and (way is not autograd or options.reduction == "none"):
        return higher_order.by_position(run, head, labels, options)
    if way is autograd:
        head = with_aligned_operands(head, options)
    loss: Tensor = way.linear_cross_entropy(head, labels, options)
    target, class_weight = labels.target, labels.class_weight
    if target.is_floating_point():  # a product with probabilities has the wider of the two dtypes
        loss = loss.to(torch.promote_types(loss.dtype, target.dtype))
        loss = loss if class_weight is None else loss.to(torch.promote_types(loss.dtype, class_weight.dtype))
    return in_shape(loss, head.leading) if options.reduction == "none" else loss


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
    check_log_probs(inputs, linear_weights, target, linear_bias, arguments)
    head = Head(tuple(inputs), tuple(linear_weights), linear_bias, scale_of(arguments.logit_scale, input))
    options = Options.of(input, arguments)
    way = way_of(head, Labels(target), options)
    if way is autograd:
        head = with_aligned_operands(head, options)
    found = way.linear_log_probs(head, target, options)
    return LogProbs(*(in_shape(each, head.leading) for each in found))


def way_of(head: Head, labels: Labels, options: Options) -> ModuleType:
    """Return what computes a call: `reference`, `higher_order` or `autograd`, with equal functions.

    The dense reference runs if it is asked for, or if its logits take no memory: if there are no
    classes, or if tensors have no data (meta tensors). The operators support no gradients of labels
    and no transforms. Only they take a sharded head; raise for one that they cannot compute.
    """
    way: ModuleType = autograd
    no_classes = head.classes == 0 and not options.sharded
    of_labels = torch.is_grad_enabled() and any(each.requires_grad for each in labels.given)
    if options.backend == "reference" or no_classes or head.device.type == "meta":
        way = reference
    elif of_labels or in_transform(*head.tensors, *labels):
        way = higher_order
    if way is not autograd:
        autograd.refuse_sharded(options)
    return way
