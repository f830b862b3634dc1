"""Compute what the fused operators cannot.

The fused operators lack derivatives of higher order, forward mode, vmap, and gradients of a target
or of class weights. For these the dense definition runs, a chunk of rows at a time
(core/rowwise/). It is exact and takes bounded memory, but is not fast.

Shapes: N tokens, V classes, P positions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from lowtide.core.kernels.devices import counted_as
from lowtide.core.rowwise.row_function import Rowwise
from lowtide.core.rowwise.variables import Both, Tensors
from lowtide.ops.linear_cross_entropy.definition import reference
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options, tensors_by_row, with_rows
from lowtide.ops.linear_cross_entropy.planning.division.sizes import too_small
from lowtide.ops.linear_cross_entropy.planning.division.workspace import workspace_bytes

# Number of tensors of the size of a chunk's logits that a derivative holds at once.
COPIES = 12


def rows_of_copies(
    V: int, copies: int, dtype: torch.dtype, workspace: int | None, device: torch.device
) -> int:
    """Return how many rows fit the workspace if a derivative holds their logits `copies` times."""
    row, bytes = copies * V * dtype.itemsize, workspace_bytes(workspace, counted_as(device.type))
    if bytes < row:
        several = f"{copies} times over where derivatives of higher order, forward mode or vmap are at work"
        raise too_small(bytes, row, f"one row of {V} logits, {several}")
    return bytes // row


def linear_cross_entropy(head: Head, labels: Labels, options: Options) -> Tensor:
    if head.by_position:
        return by_position(linear_cross_entropy, head, labels, options)
    labels = reference.flat_labels(labels)

    def losses(head: Head, labels: Labels) -> Tensors:
        return (reference.losses(reference.logits(head, options), labels, options),)

    (loss_N,) = _by_rows(losses, 1, head, labels, options)
    return reference.reduce(loss_N, labels, options)


def by_position(
    function: Callable[[Head, Labels, Options], Tensor], head: Head, labels: Labels, options: Options
) -> Tensor:
    """Compute the function for each position, and return the losses [N, P] or their reduction."""
    (input,), scale = head.inputs, head.scale
    wide = head._replace(  # their gradients are sums over positions, and rounded once
        inputs=(input.to(options.sum_dtype),), scale=None if scale is None else scale.to(options.sum_dtype)
    )
    of_rows = options._replace(reduction="none")
    losses = [
        function(part, part_labels, of_rows)
        for part, part_labels in zip(wide.at_positions(), labels.at_positions())
    ]
    loss_NP = torch.stack(losses, -1)
    if options.reduction == "none":
        return loss_NP
    target = labels.target
    rows = target.movedim(1, -1) if target.is_floating_point() else target
    flat = Labels(reference.flat_target(rows), labels.class_weight, normalizer=labels.normalizer)
    return reference.reduce(loss_NP.flatten(), flat, options)


def linear_log_probs(head: Head, target: Tensor, options: Options) -> Tensors:
    def log_probs(head: Head, labels: Labels) -> Tensors:
        return reference.log_probs(reference.logits(head, options), labels.target, options)

    return _by_rows(log_probs, 4, head, Labels(reference.flat_target(target)), options)


def _by_rows(
    function: Callable[[Head, Labels], Tensors], results: int, head: Head, labels: Labels, options: Options
) -> Tensors:
    """Compute a function of rows, which has `results` outputs, a chunk of rows at a time."""
    head = reference.flat(head, options)
    terms, by_row = len(head.inputs), tensors_by_row(labels).values()

    def chunk(rows: Tensors, whole: Tensors) -> Both:
        rest = iter(whole[terms:])
        bias, scale, weight = (
            None if own is None else next(rest) for own in (head.bias, head.scale, labels.class_weight)
        )
        own = with_rows(labels._replace(class_weight=weight), rows[terms:])
        return function(Head(rows[:terms], whole[:terms], bias, scale), own), ()

    rows = rows_of_copies(head.classes, COPIES, options.sum_dtype, options.workspace, head.device)
    whole = (*head.weights, head.bias, head.scale, labels.class_weight)
    return Rowwise(chunk, terms + len(by_row), results, rows)(
        *head.inputs, *by_row, *(each for each in whole if each is not None)
    )
