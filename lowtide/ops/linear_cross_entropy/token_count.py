"""Count the tokens of all ranks by which a mean over them divides."""

import contextlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lowtide.core.checks import check_tensors
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy.definition.validation import (
    can_be_read,
    check_classes,
    check_ignore_index,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

WIDE = torch.float64  # the dtype of the sums on all ranks, whatever their arguments; exact to 2^53 tokens


def tokens_per_rank(
    target: Tensor | Sequence[Tensor],
    *,
    group: Union["ProcessGroup", "DeviceMesh", None] = None,
    ignore_index: int | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    r"""Return the mean number of targets per rank that count: a normalizer for averaged gradients.

    Example::

        normalizer = lowtide.tokens_per_rank([each["labels"] for each in micro_batches])
        for each in micro_batches:
            hidden = model(each["tokens"])
            loss = lowtide.linear_cross_entropy(
                hidden, head.weight, each["labels"], normalizer=normalizer
            )
            loss.backward()

    With :math:`n_r` targets of rank r that are not `ignore_index`, and P ranks, the result is

    .. math:: n = \frac{1}{P} \sum_r n_r.

    DDP and FSDP divide the sum of the ranks' gradients by P. So if each rank divides the sum of its
    losses by n, the averaged gradient is that of the mean over all tokens of all ranks, however
    many tokens each of them has. The mean of the ranks' losses is this mean as well.

    Shapes: target of any shape, or several such; weight [V]; the result is 0-d.

    Args:
        target: class indices: this rank's, of all micro-batches of one optimizer step. Under
            sequence parallelism these are the targets of this rank's part of the sequence.
        group: the ranks over which gradients are averaged: a process group, or a device mesh with
            all of its dimensions. None is the default group, or one rank if there is none. Ranks
            that have the same tokens (tensor parallelism) do not belong to one group here.
        ignore_index: targets that do not count; None means -100.
        weight: the class weights of the loss. The result is then the mean, over the ranks, of the
            total weight of a rank's targets: with class weights `"mean"` divides by such a total.

    Communication: one all-reduce of 16 bytes, also under torch.compile. The host does not wait on
    CUDA.

    Precision: counts are exact before the division. The result is float32, or float64 if torch's
    default dtype is float64, with `weight` if that is float64.

    Raises:
        ValueError, TypeError: for class probabilities and other arguments that do not fit. Each is
            also a RuntimeError. On the CPU the other ranks raise an error, too; on CUDA and in a
            graph their result is NaN.
        IndexError: for a target that is no class of `weight`, on the CPU. On CUDA the result of all
            ranks is NaN.
    """
    groups = _groups(group)
    try:
        counts = _counts(target, ignore_index, weight)
    except Exception:
        # Tell the other ranks, which wait for this sum on the device of their tensors.
        with contextlib.suppress(Exception):
            _sum_over(groups, torch.tensor([0.0, 1.0], dtype=WIDE, device=_device(target, weight)))
        raise
    own = counts[1]
    total, wrong = _sum_over(groups, counts)
    dtype = _sum_dtype(torch.get_default_dtype() if weight is None else weight.dtype)
    if not can_be_read(wrong):  # on CUDA a check would wait for the device
        total = total.masked_fill(wrong > 0, torch.nan)
    elif wrong > 0:
        if weight is not None and own > 0:
            check_classes(
                torch.cat([each.flatten() for each in _targets(target)]), len(weight), _ignored(ignore_index)
            )
        raise ArgumentError(
            "another rank of the group raised an error in tokens_per_rank, or has targets that are no class; "
            "its own error says more"
        )
    ranks = 1
    for each in groups:
        ranks *= dist.get_world_size(each)
    return (total / ranks).to(dtype)


def _device(*arguments: object) -> torch.device:
    """Return the device on which the other ranks reduce: that of the first tensor argument.

    Without any tensor it is the card if the default backend is NCCL, else the CPU.
    """
    for each in tree_leaves(arguments):
        if isinstance(each, Tensor):
            return each.device
    nccl = dist.is_available() and dist.is_initialized() and dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def _targets(target: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [target] if isinstance(target, Tensor) else list(target)


def _ignored(ignore_index: int | None) -> int:
    return -100 if ignore_index is None else ignore_index


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _counts(target: Tensor | Sequence[Tensor], ignore_index: int | None, weight: Tensor | None) -> Tensor:
    """Return how many targets count, or the sum of their weights; and how many are no class."""
    targets = _targets(target)
    named = {f"target[{k}]": each for k, each in enumerate(targets)}
    check_tensors(named if weight is None else named | {"weight": weight})
    check_ignore_index(ignore_index)
    if not targets:
        raise ArgumentError(
            "target must hold one tensor at least, got none; pass an empty one, on its device"
        )
    for name, each in named.items():
        if is_dtensor(each):
            raise ArgumentTypeError(
                f"{name} must hold this rank's own targets, got a DTensor; pass {name}.to_local(), and as "
                "group the ranks that have tokens of their own"
            )
        if each.is_floating_point() or each.is_complex() or each.dtype == torch.bool:
            raise ArgumentTypeError(
                f"{name} must hold class indices, got {each.dtype}; of class probabilities every row counts: "
                "pass torch.zeros(rows, dtype=torch.long)"
            )
    return torch.stack([_counted(each, _ignored(ignore_index), weight) for each in targets]).sum(0)


def _counted(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    target = target.long()  # a narrower dtype would wrap ignore_index
    counted = target != ignore_index
    if weight is None:
        return torch.stack([counted.sum(), counted.new_zeros((), dtype=torch.long)]).to(WIDE)
    wrong = counted & ((target < 0) | (target >= len(weight)))
    own = weight.detach().to(_sum_dtype(weight.dtype))
    of_target = own[target.masked_fill(~counted | wrong, 0)].masked_fill(~counted | wrong, 0)
    return torch.stack([of_target.sum().to(WIDE), wrong.sum().to(WIDE)])


def _sum_over(groups: "list[ProcessGroup | None]", counts: Tensor) -> Tensor:
    total = counts.clone()
    for each in groups:
        dist.all_reduce(total, group=each)
    return total


def _groups(group: Union["ProcessGroup", "DeviceMesh", None]) -> "list[ProcessGroup | None]":
    """Return the process groups; sums over one after the other make a sum over all ranks."""
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
