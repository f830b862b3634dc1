"""Turn the arguments of a sharded call into this rank's tensors, and its result back.

A head is sharded if its weight is a DTensor whose classes are divided over one dimension of its
mesh, or if the caller passes a process group and the rows of this rank. What DTensor's placements
say of gradients is said here too: the operator returns an input's gradient summed over the ranks,
and a weight's of this rank's classes alone.

Shapes: N tokens, D features, V classes of all ranks, V_r of this one.
"""

import contextlib
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard
from lowtide.ops.linear_cross_entropy.definition.vocab_shard import classes_of_rank, greatest, least
from lowtide.ops.linear_cross_entropy.ranks import messages

TENSORS = ("input", "linear_weight", "target", "linear_bias", "weight", "logit_scale")
"""The tensors whose places are told here; any other one of a call is divided as its tokens are."""

ResultT = TypeVar("ResultT")


class Division(NamedTuple):
    """Hold the arguments that say how the classes are divided over ranks, or into segments."""

    group: Any = None
    first_class: int | None = None
    num_classes: int | None = None
    tokens_sharded: bool = False
    segments: int | None = None


@dataclass(frozen=True)
class ShardedCall:
    """Hold this rank's tensors of a call, by the names of its arguments, and how to return."""

    tensors: dict[str, Any]
    shard: VocabShard | None
    result_of: Any = None
    """The input, if it is a DTensor; then so are the results."""

    def returned(self, result: Tensor, *, by_row: bool) -> Tensor:
        """Return a result as what the input is: a tensor, or a DTensor of the same mesh."""
        if self.result_of is None:
            return result
        from torch.distributed.tensor import Replicate

        like = self.result_of
        if by_row:
            return _placed_by_row(result, like)
        return _placed(result, like.device_mesh, [Replicate()] * like.device_mesh.ndim, torch.Size())


def placed_as(input: Any, by_row: Any) -> Any:
    """Return a tensor with an entry for each row as what the input is: a tensor, or a DTensor."""
    if is_dtensor(by_row) == is_dtensor(input):
        return by_row
    return _placed_by_row(by_row, input) if is_dtensor(input) else by_row.to_local()


def _placed_by_row(own: Tensor, input: Any) -> Tensor:
    """Return this rank's rows as a DTensor; a K-dimensional loss has K dimensions more."""
    rows = input.dim() - 1
    return _placed(own, input.device_mesh, input.placements, (*input.shape[:rows], *own.shape[rows:]))


def _placed(own: Tensor, mesh: Any, placements: Any, shape: tuple[int, ...]) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = tuple(math.prod(shape[place + 1 :]) for place in range(len(shape)))
    whole: Tensor = DTensor.from_local(
        own, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return whole


def run_sharded(
    compute: Callable[..., ResultT], tensors: dict[str, Any], division: Division
) -> tuple[ShardedCall, ResultT]:
    """Return this rank's part of a call, and what `compute` makes of its tensors and its shard.

    `tensors` are those of `sharded_call`.
    """
    with telling_errors(tensors, division.group):
        call = sharded_call(tensors, division)
        return call, compute(**call.tensors, shard=call.shard)


def telling_errors(tensors: dict[str, Any], group: Any) -> contextlib.AbstractContextManager[None]:
    """Tell the other ranks of a sharded call if its arguments are refused on this one.

    It is opened around all of the call, `sharded_call` included.
    """
    if torch.compiler.is_compiling():
        return contextlib.nullcontext()
    group = _group_of(tensors["linear_weight"], group)
    return contextlib.nullcontext() if group is None else messages.telling_errors(group.group_name)


def _group_of(weight: Any, group: Any) -> Any:
    """Return the process group of a call, also where its arguments are refused; None if unknown."""
    if group is not None:
        import torch.distributed as dist

        return group if isinstance(group, dist.ProcessGroup) and group.rank() >= 0 else None
    if not is_dtensor(weight) or weight.device_mesh.get_coordinate() is None:
        return None
    mesh, placements = weight.device_mesh, weight.placements
    places = [place for place, each in enumerate(placements) if mesh.ndim == 1 or not each.is_replicate()]
    return mesh.get_group(places[0]) if len(places) == 1 else None


def sharded_call(tensors: dict[str, Any], division: Division) -> ShardedCall:
    """Return this rank's part of a call; that of a head that is not sharded is the call itself.

    `tensors` are the arguments in TENSORS, by name, and those with an entry for each row; those
    that are not given are None.
    """
    group, first_class, num_classes, tokens_sharded, segments = division
    numbers = (first_class, num_classes, segments)
    named = group is not None or numbers != (None, None, None) or tokens_sharded
    if not named and not any(map(is_dtensor, tensors.values())):
        return ShardedCall(tensors, None)
    _check_numbers(*numbers)
    if is_dtensor(tensors["linear_weight"]):
        if group is not None or first_class is not None:
            raise ArgumentError(
                "linear_weight must be this rank's own rows, a plain tensor, where group or first_class is "
                "given, got a DTensor, which says both itself; leave them out"
            )
        call = _of_dtensors(tensors, num_classes, tokens_sharded)
    elif group is not None:
        call = _of_group(tensors, division)
    else:
        call = _of_one_process(tensors, division)
    if call.shard is None:
        return call
    shard = call.shard._replace(segments=segments or 0)
    return replace(call, shard=shard, tensors=_without_padding(call.tensors, shard))


def _check_numbers(first_class: Any, num_classes: Any, segments: Any) -> None:
    numbers = {"first_class": (first_class, 0), "num_classes": (num_classes, 1), "segments": (segments, 1)}
    for name, (number, lowest) in numbers.items():
        if number is None:
            continue
        if isinstance(number, (bool, Tensor)) or not hasattr(number, "__index__"):
            raise ArgumentTypeError(f"{name} must be an int or None, got {number!r}")
        if number < lowest:
            raise ArgumentError(f"{name} must be at least {lowest}, got {number}")


def _of_one_process(tensors: dict[str, Any], division: Division) -> ShardedCall:
    _, first_class, num_classes, tokens_sharded, segments = division
    if first_class is not None or num_classes is not None or tokens_sharded:
        raise ArgumentError(
            "group must be given with first_class, num_classes or tokens_sharded, or linear_weight be a "
            "DTensor with placement Shard(0); got neither"
        )
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise ArgumentError(
                f"{name} must be a plain tensor where linear_weight is one and group is not given, got a "
                f"DTensor; pass {name}.to_local(), or linear_weight as a DTensor with placement Shard(0)"
            )
    weight = tensors["linear_weight"]
    if segments is None or not isinstance(weight, Tensor) or weight.dim() < 2 or weight.shape[0] == 0:
        return ShardedCall(tensors, None)
    return ShardedCall(tensors, VocabShard(num_classes=weight.shape[0]))


def _of_group(tensors: dict[str, Any], division: Division) -> ShardedCall:
    import torch.distributed as dist

    group, first_class, num_classes, tokens_sharded, _ = division
    outside = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER  # of dist.new_group
    if not outside and not isinstance(group, dist.ProcessGroup):
        raise ArgumentTypeError(
            f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}; "
            "of a DeviceMesh, pass mesh.get_group(dimension)"
        )
    if outside or group.rank() < 0:
        raise ArgumentError("group must have this process as a member, got a group that it is not in")
    weight, ranks = tensors["linear_weight"], group.size()
    classes = weight.shape[0] if isinstance(weight, Tensor) and weight.dim() > 1 else 0
    # Megatron's rule, where every rank has as many.
    first_class = group.rank() * classes if first_class is None else operator.index(first_class)
    num_classes = max(1, ranks * classes) if num_classes is None else operator.index(num_classes)
    shard = VocabShard(group.group_name, ranks, first_class, num_classes, bool(tokens_sharded))
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise ArgumentError(
                f"{name} must be this rank's own tensor where group is given, got a DTensor; "
                f"pass {name}.to_local(), or linear_weight as a DTensor and no group"
            )
    _check_probabilities(tensors["target"], shard)
    return ShardedCall(tensors, shard)


def _of_dtensors(tensors: dict[str, Any], num_classes: int | None, tokens_sharded: bool) -> ShardedCall:
    from torch.distributed.tensor import Replicate, Shard

    weight, input = tensors["linear_weight"], tensors["input"]
    mesh, whole = weight.device_mesh, [Replicate()] * weight.device_mesh.ndim
    divided = {place: each for place, each in enumerate(weight.placements) if not each.is_replicate()}
    if [(type(each), getattr(each, "dim", None)) for each in divided.values()] != [(Shard, 0)]:
        raise ArgumentError(
            "linear_weight must be divided by classes over one dimension of its mesh, with placement "
            f"Shard(0) there and Replicate() on others, got {tuple(weight.placements)}; redistribute it, or "
            "pass a plain tensor"
        )
    (place,) = divided
    if mesh.get_coordinate() is None:
        raise ArgumentError(
            "linear_weight's mesh must have this process as a member, got a mesh that it is not in; make "
            "this call on the ranks of the mesh alone"
        )
    if mesh.ndim > 1 and not is_dtensor(input):
        raise ArgumentError(
            f"input must be a DTensor where linear_weight's mesh has {mesh.ndim} dimensions, got a plain "
            "tensor, which does not say whether ranks of the other dimensions have the same; pass a DTensor, "
            "or linear_weight on the one-dimensional mesh of its shards"
        )

    def placed(on_place: Any) -> tuple[Any, ...]:
        return (*whole[:place], on_place, *whole[place + 1 :])

    tokens_placements = placed(Replicate())
    if is_dtensor(input):
        if tokens_sharded:
            raise ArgumentError(
                "tokens_sharded must be left out where input is a DTensor, whose placements say it"
            )
        on_place: Any = input.placements[place] if input.device_mesh == mesh else None
        tokens_sharded = type(on_place) is Shard and on_place.dim < input.dim() - 1
        tokens_placements = placed(on_place)
        known = tokens_sharded or (on_place is not None and on_place.is_replicate())
        if not known or tuple(input.placements) != tokens_placements:
            raise ArgumentError(
                "input must be replicated on linear_weight's mesh, or divided by tokens over the dimension "
                f"that divides the classes, got {tuple(input.placements)} on {input.device_mesh}; "
                "redistribute it, with [Replicate()] on a mesh of one dimension"
            )
    group, V = mesh.get_group(place), weight.shape[0]
    own_weight = weight.to_local(grad_placements=weight.placements)
    shard = VocabShard(
        group.group_name,
        group.size(),
        classes_of_rank(mesh, V, place).start,
        V if num_classes is None else operator.index(num_classes),
        tokens_sharded,
    )
    _check_probabilities(tensors["target"], shard)

    def local(name: str, tensor: Any, expected: tuple[Any, ...]) -> Any:
        if not is_dtensor(tensor):
            return tensor
        if tensor.device_mesh != mesh or tuple(tensor.placements) != expected:
            raise ArgumentError(
                f"{name} must have placements {expected} on linear_weight's mesh, got "
                f"{tuple(tensor.placements)} on {tensor.device_mesh}; redistribute it"
            )
        return tensor.to_local(grad_placements=expected)

    target, class_weight = tensors["target"], tensors["weight"]
    by_class = isinstance(target, Tensor) and target.is_floating_point()
    target_placements = placed(Shard(input.dim() - 1)) if by_class else tokens_placements
    if by_class and weight.dim() > 2:  # [N, V, d1, ..., dK]
        target_placements = placed(Shard(1))
    if is_dtensor(class_weight) and tuple(class_weight.placements) == tuple(whole):
        class_weight = local("weight", class_weight, tuple(whole))
    if isinstance(class_weight, Tensor) and not is_dtensor(class_weight) and class_weight.shape == (V,):
        class_weight = class_weight.narrow(0, shard.first_class, own_weight.shape[0])
    placements = {
        "target": target_placements,
        "linear_bias": placed(Shard(0)),
        "weight": placed(Shard(0)),
        "logit_scale": tuple(whole),
    }
    own = tensors | {"linear_weight": own_weight, "weight": class_weight}  # no DTensor of classes is left
    own = {name: local(name, each, placements.get(name, tokens_placements)) for name, each in own.items()}
    return ShardedCall(own, shard, input if is_dtensor(input) else None)


def _check_probabilities(target: Any, shard: VocabShard) -> None:
    if shard.tokens_sharded and isinstance(target, Tensor) and target.is_floating_point():
        raise ArgumentError(
            "input must be the same on all ranks where target holds class probabilities, of which each rank "
            "has those of its own classes for all tokens; gather input over the group"
        )


def _without_padding(tensors: dict[str, Any], shard: VocabShard) -> dict[str, Any]:
    """Cut off the classes from num_classes on, which pad the vocabulary."""
    weight = tensors["linear_weight"]
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        return tensors
    V_r = weight.shape[0]
    real = greatest(0, least(V_r, shard.num_classes - shard.first_class))
    if real == V_r:
        return tensors

    def cut(tensor: Any, dim: int) -> Any:
        fits = isinstance(tensor, Tensor) and -tensor.dim() <= dim < tensor.dim()
        return tensor.narrow(dim, 0, real) if fits and tensor.shape[dim] == V_r else tensor

    found = tensors | {name: cut(tensors[name], 0) for name in ("linear_weight", "linear_bias", "weight")}
    target = tensors["target"]
    if isinstance(target, Tensor) and target.is_floating_point():
        found["target"] = cut(target, 1 if weight.dim() > 2 else -1)
    return found
