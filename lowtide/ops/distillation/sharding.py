"""Turn the arguments of a call whose classes are divided over ranks into this rank's tensors.

Student and teacher are divided in the same way. linear_cross_entropy/sharding.py reads placements
and groups, for one head at a time.

If the student's head is one of `lowtide.shard_head`, each rank has tokens of its own. The teacher's
head is then one of `lowtide.shard_head` too, or each rank has the whole teacher's head and takes
its own classes from it.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lowtide.core.checks import check_tensors
from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.core.fsdp import check_gathered, refuse_derived, refuse_unreduced
from lowtide.ops.distillation.heads import Heads
from lowtide.ops.linear_cross_entropy.data_sharded import (
    check_mark,
    check_options,
    check_whole,
    is_data_sharded,
    mean_over_ranks,
    own_classes,
    own_part,
    place_of,
)
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard
from lowtide.ops.linear_cross_entropy.sharding import TENSORS, Division, ShardedCall, sharded_call

GATHERING = (
    "call this in the forward of the unit that holds the head, which must be no unit of its own (leave out "
    "fully_shard(head)); or divide a student's head by lowtide.shard_head, and pass a teacher's, which takes "
    "no gradient, as weight.detach().full_tensor()"
)


def own_heads(
    heads: Heads, division: Division
) -> tuple[Heads, VocabShard | None, Callable[[Tensor, str], Tensor]]:
    """Return this rank's heads, the place of its classes, and a function from loss to result.

    That function gets the loss and the reduction. It returns a DTensor if student_input is one. If
    the student's head is one of `lowtide.shard_head`, it averages a mean or sum over the ranks. If
    no classes are divided, the place is None and the heads are those passed.
    """
    data_sharded = is_data_sharded(heads.student_weight)
    if data_sharded:
        heads, division = _of_data_sharded(heads, division)
    calls = []
    for side, ignored in (("student", heads.ignored), ("teacher", None)):
        input, weight, bias = getattr(heads, side)
        if not data_sharded:
            with _named_after(side):
                check_mark(input, weight)
            _check_parameter(f"{side}_weight", weight)
            _check_parameter(f"{side}_bias", bias)
        tensors = dict.fromkeys(TENSORS) | {"input": input, "linear_weight": weight, "linear_bias": bias}
        with _named_after(side):
            calls.append(sharded_call({**tensors, "target": ignored}, division))
    student, teacher = calls
    if student.shard != teacher.shard:
        raise ArgumentError(
            "teacher_weight must be divided over ranks as student_weight is, class by class, got "
            f"{_place(teacher)} beside {_place(student)}; divide both alike, and pass DTensors or this "
            "rank's rows for both"
        )
    names = ("input", "linear_weight", "linear_bias")
    sides = [[call.tensors[name] for name in names] for call in calls]
    own = Heads._make((*sides[0], *sides[1], student.tensors["target"]))

    def returned(loss: Tensor, reduction: str) -> Tensor:
        if data_sharded and reduction != "none":
            return mean_over_ranks(loss, division.group, of_all_tokens=reduction == "mean")
        return student.returned(loss, by_row=reduction == "none")

    return own, student.shard, returned


def _of_data_sharded(heads: Heads, division: Division) -> tuple[Heads, Division]:
    """Return this rank's part of a `lowtide.shard_head` student and its teacher, and its place."""
    (x, weight, bias), (teacher_input, teacher_weight, teacher_bias) = heads.student, heads.teacher
    names = ("student_input", "teacher_input", "teacher_weight")
    check_tensors({name: getattr(heads, name) for name in names})
    with _named_after("student"):
        check_options(weight, division._asdict() | {"linear_bias": bias})
    if not is_data_sharded(teacher_weight):
        with _named_after("teacher"):
            check_mark(teacher_input, teacher_weight)
    own = heads._replace(
        student_weight=own_part(weight, x.dtype),
        student_bias=None if bias is None else own_part(bias, x.dtype),
        teacher_weight=_own_part_of_teacher("teacher_weight", teacher_weight, weight, teacher_input),
        teacher_bias=_own_part_of_teacher("teacher_bias", teacher_bias, weight, teacher_input),
    )
    return own, Division(**place_of(weight, division.num_classes))


def _own_part_of_teacher(name: str, parameter: Any, student_weight: Any, teacher_input: Tensor) -> Any:
    """Return a teacher's weight or bias, detached, for this rank's classes of the student."""
    if parameter is None:
        return None
    if is_data_sharded(parameter) and parameter.device_mesh == student_weight.device_mesh:
        alike = parameter.shape[0] == student_weight.shape[0]
        part = parameter.to_local().detach().to(teacher_input.dtype)
    else:
        _check_parameter(name, parameter)
        alike = not is_dtensor(parameter) and parameter.shape[:1] == student_weight.shape[:1]
        part = parameter.detach()
        part = part[own_classes(student_weight)] if alike else part
    if not alike:
        raise ArgumentError(
            f"{name} must hold the {student_weight.shape[0]} classes of student_weight, a head of "
            "lowtide.shard_head: as a plain tensor of all of them, or of another such head on the same "
            f"mesh, got a {type(parameter).__name__} of {parameter.shape[0] if parameter.dim() else 'no'} "
            "classes; call lowtide.shard_head for the teacher's model too, or gather its weight"
        )
    return part


def _check_parameter(name: str, parameter: Any) -> None:
    """Raise for a parameter that lowtide.shard_head or FSDP2 divides, or a tensor made from one."""
    check_whole(name, parameter)
    refuse_unreduced(name, parameter)
    check_gathered(name, parameter, GATHERING)
    refuse_derived(name, parameter)


@contextlib.contextmanager
def _named_after(side: str) -> Iterator[None]:
    """Replace the names of the loss's arguments by distillation's in errors raised inside."""
    names = {"input": f"{side}_input", "target": "ignored"}
    names |= {f"linear_{kind}": f"{side}_{kind}" for kind in ("weight", "bias")}
    try:
        yield
    except (ArgumentError, ArgumentTypeError) as error:
        pattern = rf"\b({'|'.join(names)})\b"
        raise type(error)(re.sub(pattern, lambda found: names[found[0]], str(error))) from None


def _place(call: ShardedCall) -> str:
    if call.shard is None:
        return "a weight that is not divided"
    first, classes = call.shard.first_class, call.tensors["linear_weight"].shape[0]
    return f"classes [{first}, {first + classes}) of {call.shard.num_classes}"
