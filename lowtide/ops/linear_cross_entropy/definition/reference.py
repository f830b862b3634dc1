"""Define the loss in few lines, for any dtype, device and derivative, with all logits at once.

Shapes: N tokens, V classes; D_k features of term k.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.autodiff import without_autocast
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.definition.head import (
    Head,
    Labels,
    Options,
    number_beside,
    tensors_by_row,
    with_rows,
)
from lowtide.ops.linear_cross_entropy.definition.validation import check_classes


def linear_cross_entropy(head: Head, labels: Labels, options: Options) -> Tensor:
    if not labels.target.is_floating_point():
        check_classes(labels.target, head.classes, options.ignore_index)
    head, labels = flat(head, options), flat_labels(labels)
    logits_NV = logits(head, options)
    if head.classes == 0:
        return without_logits(logits_NV, labels, options)
    loss_N = losses(logits_NV, labels, options)
    return reduce(loss_N, labels, options)


def without_classes_or_positions(head: Head, labels: Labels, options: Options) -> Tensor:
    """Compute a K-dimensional loss with V = 0 or P = 0."""
    V, P = head.weights[0].shape[:2]
    if not labels.target.is_floating_point():
        check_classes(labels.target, V, options.ignore_index)
    bias = None if head.bias is None else head.bias.flatten()
    whole = flat(head._replace(weights=(head.weights[0].flatten(0, 1),), bias=bias), options)
    return without_logits(logits(whole, options).view(head.tokens, V, P), labels, options)


def without_logits(
    logits: Tensor,  # [N, V] or [N, V, P], of which V or P is 0
    labels: Labels,
    options: Options,
) -> Tensor:
    """Return torch's loss of no logits: 0 for each row, and NaN for a division by 0."""
    target, class_weight_V = labels.target, labels.class_weight
    V, probabilities = logits.shape[1], target.is_floating_point()
    if V == 0 and options.z_loss:
        raise ArgumentError("linear_weight must have at least one class where z_loss is not 0, got none")
    terms = logits.movedim(1, -1)
    if probabilities:
        terms = terms * target.movedim(1, -1)
        terms = terms if class_weight_V is None else terms * class_weight_V
    loss = terms.sum(-1)
    if not probabilities:
        loss = loss.masked_fill(target != options.ignore_index, torch.nan)
    loss = _weighted(loss, labels, options)
    nothing = (options.reduction == "mean" and labels.normalizer is None) or (
        V == 0 and not probabilities and options.label_smoothing > 0
    )
    loss = loss if options.reduction == "none" else loss.sum()
    loss = loss if labels.normalizer is None else loss / labels.normalizer
    return loss + torch.nan if nothing else loss


def linear_log_probs(head: Head, target: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check_classes(target, head.classes, options.ignore_index)
    head = flat(head, options)
    return log_probs(logits(head, options), flat_target(target), options)


def flat(head: Head, options: Options) -> Head:
    """Return the head with inputs [N, D_k], in the dtype of the sums.

    On CUDA inputs and weights are first rounded to the dtype of the products' operands.
    """

    def exact(tensor: Tensor) -> Tensor:
        rounded = tensor.to(options.compute_dtype) if tensor.is_cuda else tensor  # see OperandAccess
        return rounded.to(options.sum_dtype)

    return Head(
        tuple(exact(input).reshape(head.tokens, input.shape[-1]) for input in head.inputs),
        tuple(exact(weight) for weight in head.weights),
        None if head.bias is None else head.bias.to(options.sum_dtype),
        None if head.scale is None else head.scale.to(options.sum_dtype),
    )


def flat_target(target: Tensor) -> Tensor:
    """Return [N] class indices or [N, V] class probabilities."""
    # In a narrower dtype ignore_index would wrap around in a comparison.
    if not target.is_floating_point():
        return target.flatten().long()
    return target.reshape(math.prod(target.shape[:-1]), target.shape[-1])


def flat_labels(labels: Labels) -> Labels:
    target, *rest = tensors_by_row(labels).values()
    return with_rows(labels, (flat_target(target), *(each.flatten() for each in rest)))


def logits(head: Head, options: Options) -> Tensor:  # [N, V]
    with without_autocast(head.device):
        logits_NV = F.linear(head.inputs[0], head.weights[0], head.bias)
        for input, weight in zip(head.inputs[1:], head.weights[1:]):
            logits_NV = logits_NV + F.linear(input, weight)
    if head.scale is not None:
        logits_NV = head.scale * logits_NV
    if options.softcap:
        logits_NV = options.softcap * torch.tanh(logits_NV / options.softcap)
    return logits_NV


def losses(logits_NV: Tensor, labels: Labels, options: Options) -> Tensor:
    """Return the loss of each row [N]: 0 for ignored rows, NaN for a target that is no class."""
    target, class_weight_V = labels.target, labels.class_weight
    V, smoothing = logits_NV.shape[1], options.label_smoothing
    weight_V = logits_NV.new_ones(V) if class_weight_V is None else class_weight_V.to(logits_NV.dtype)
    logsumexp_N = logits_NV.logsumexp(1)
    nll_NV = -logits_NV.log_softmax(1)
    if target.is_floating_point():
        target_NV = target.to(logits_NV.dtype) * (1 - smoothing) + smoothing / V
        loss_N = (nll_NV * weight_V * target_NV).sum(1) + options.z_loss * logsumexp_N**2
        return _weighted(loss_N, labels, options)
    ignored_N, invalid_target_N, class_N = target_classes(target, V, options.ignore_index)
    loss_N = (1 - smoothing) * weight_V[class_N] * nll_NV.gather(1, class_N[:, None])[:, 0]
    if smoothing:
        loss_N = loss_N + smoothing / V * (nll_NV @ weight_V)
    loss_N = _weighted(loss_N + options.z_loss * logsumexp_N**2, labels, options)
    return loss_N.masked_fill(invalid_target_N, torch.nan).masked_fill(ignored_N, 0)


def _weighted(loss: Tensor, labels: Labels, options: Options) -> Tensor:
    """Multiply each row's loss by its weight; an ignored row's weight counts as 0, even if NaN."""
    if labels.row_weight is None:
        return loss
    weight = labels.row_weight.to(loss.dtype)
    if not labels.target.is_floating_point():
        weight = weight.masked_fill(labels.target == options.ignore_index, 0)
    return loss * weight


def log_probs(logits_NV: Tensor, target_N: Tensor, options: Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log_prob, entropy, logsumexp and argmax; ignored rows have 0, 0, 0 and -1."""
    ignored_N, invalid_target_N, class_N = target_classes(target_N, logits_NV.shape[1], options.ignore_index)
    logsumexp_N = logits_NV.logsumexp(1)
    log_prob_NV = logits_NV.log_softmax(1)
    log_prob_N = log_prob_NV.gather(1, class_N[:, None])[:, 0].masked_fill(invalid_target_N, torch.nan)
    # A class that a bias of -inf excludes has probability 0 and adds 0, not 0 times infinity.
    finite_NV = log_prob_NV.masked_fill(log_prob_NV == -torch.inf, 0)
    entropy_N = -(log_prob_NV.exp() * finite_NV).sum(1)
    values = (each.masked_fill(ignored_N, 0) for each in (log_prob_N, entropy_N, logsumexp_N))
    return (*values, logits_NV.detach().argmax(1).masked_fill(ignored_N, -1))


def reduce(loss_N: Tensor, labels: Labels, options: Options) -> Tensor:
    target, class_weight_V = labels.target, labels.class_weight
    if options.reduction == "none":
        return loss_N
    if options.reduction == "sum":
        return loss_N.sum()
    total_1 = loss_N.sum(0, keepdim=True)  # vmap over an empty batch cannot divide 0-d tensors
    if labels.normalizer is not None:
        return (total_1 / labels.normalizer.to(loss_N.dtype)).squeeze(0)
    if target.is_floating_point():
        return (total_1 / number_beside(total_1, target.shape[0] or torch.nan)).squeeze(0)
    if class_weight_V is None:
        ignored_N = target == options.ignore_index
        kept_1 = (~ignored_N).sum(0, keepdim=True).to(loss_N.dtype)
    else:
        ignored_N, _, class_N = target_classes(target, class_weight_V.shape[0], options.ignore_index)
        weight_N = class_weight_V.to(loss_N.dtype)[class_N].masked_fill(ignored_N, 0)
        kept_1 = weight_N.sum(0, keepdim=True)
    # If every row is ignored, the loss is NaN and the gradients are zero, as in torch.
    nothing_1 = ignored_N.all(0, keepdim=True)
    mean_1 = total_1 / kept_1.masked_fill(nothing_1, 1)
    return mean_1.masked_fill(nothing_1, torch.nan).squeeze(0)


def target_classes(target_N: Tensor, V: int, ignore_index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return which rows are ignored, which targets are no class, and a valid class of each row."""
    ignored_N = target_N == ignore_index
    invalid_target_N = ((target_N < 0) | (target_N >= V)) & ~ignored_N
    return ignored_N, invalid_target_N, target_N.masked_fill(ignored_N | invalid_target_N, 0)
