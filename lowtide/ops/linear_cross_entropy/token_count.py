"""Count the tokens of all ranks for a mean over them."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import torch
import torch.distributed as dist
from torch import Tensor

from lowtide.core.checks import check_tensors
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy.definition.validation import check_ignore_index

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def tokens_per_rank(
    target: Tensor | Sequence[Tensor],
    *,
    group: Union["ProcessGroup", "DeviceMesh", None] = None,
    ignore_index: int | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Return the mean number of targets that count per rank, the normaliser of averaged gradients.

    Example::

        normalizer = lowtide.tokens_per_rank([each["labels"] for each in micro_batches])
        for each in micro_batches:
            hidden = model(each["tokens"])
            loss = lowtide.linear_cross_entropy(
                hidden, head.weight, each["labels"], normalizer=normalizer
            )
            loss.backward()

    With :math:`n_r` the targets of rank r that are not `ignore_index`, and P ranks, the result is

    .. math:: n = \frac{1}{P} \sum_r n_r.

    DDP and FSDP divide the sum of the ranks' gradients by P. So if each rank divides the sum of its
    losses by n, the averaged gradient is that of the mean over all tokens of all ranks, however
    many tokens each of them has. The mean of the ranks' losses is this mean, too.

    Shapes: target of any shape, or several such; weight [V]; the result is 0-d.

    Args:
        target: class indices: this rank's, of all micro-batches of one optimizer step. Under
            sequence parallelism these are the targets of this rank's part of the sequence.
        group: the ranks over which gradients are averaged: a process group, or a device mesh, all
            of whose dimensions count. None is the default group, and one rank without any. Ranks
            that have the same tokens (tensor parallelism) do not belong to it.
        ignore_index: targets that do not count; None means -100.
        weight: the class weights of the loss. The result is then the mean total of the targets'
            weights per rank, what `"mean"` divides by beside class weights.

    Communication: one all-reduce of 8 bytes, also under torch.compile. The host does not wait.

    Precision: counts are exact before the division. The result has torch's default dtype, or with
    `weight` that of its sum, float32 or float64.

    Raises:
        ValueError, TypeError: for class probabilities and other arguments that do not fit. Each is
            also a RuntimeError.
    """
    targets = [target] if isinstance(target, Tensor) else list(target)
    named = {f"target[{k}]": each for k, each in enumerate(targets)}
    check_tensors(named if weight is None else named | {"weight": weight})
    check_ignore_index(ignore_index)
    if not targets:
        raise ArgumentError(
            "target must hold one tensor at least, got none; pass an empty one, on its device"
        )
    for name, each in named.items():
        if each.is_floating_point() or each.is_complex() or each.dtype == torch.bool:
            raise ArgumentTypeError(
                f"{name} must hold class indices, got {each.dtype}; of class probabilities every row counts: "
                "pass torch.zeros(rows, dtype=torch.long)"
            )
    groups = _groups(group)
    ignored = -100 if ignore_index is None else ignore_index
    total = torch.stack([_counted(each, ignored, weight) for each in targets]).sum()
    ranks = 1
    for each in groups:
        dist.all_reduce(total, group=each)
        ranks *= dist.get_world_size(each)
    return total / ranks


def _counted(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """Return how many targets count, or the sum of their class weights."""
    counted = target.long() != ignore_index  # a narrower dtype would wrap ignore_index
    if weight is None:
        return counted.sum()
    own = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
    return own[target.long().masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()


def _groups(group: Union["ProcessGroup", "DeviceMesh", None]) -> "list[ProcessGroup | None]":
    """Return the groups over which one sum after the other is a sum over all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ArgumentError(
                f"tokens_per_rank counts the tokens of all ranks, and torchrun has started "
                f"{os.environ['WORLD_SIZE']}, but there is no process group; call "
                "torch.distributed.init_process_group() first"
            )
        return []
    mesh_dims = getattr(group, "ndim", None)
    coordinate = group.get_coordinate() if mesh_dims is not None else [dist.get_rank(group)]  # type: ignore
    if coordinate is None or min(coordinate, default=0) < 0:
        raise ArgumentError(
            "group must have this process as a member, got a group that it is not in; call "
            "tokens_per_rank on the ranks of the group alone"
        )
    if mesh_dims is None:
        return [group]  # type: ignore[list-item]
    return [group.get_group(dim) for dim in range(mesh_dims)]  # type: ignore[union-attr]
