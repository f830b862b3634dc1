"""Turn the arguments of a call whose classes are divided over ranks into this rank's tensors.

Student and teacher are divided alike. linear_cross_entropy/sharding.py reads placements and groups,
head by head.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.core.fsdp import check_gathered, refuse_derived, refuse_unreduced
from lowtide.ops.distillation.heads import Heads
from lowtide.ops.linear_cross_entropy.data_sharded import check_whole
from lowtide.ops.linear_cross_entropy.definition.vocab_shard import VocabShard
from lowtide.ops.linear_cross_entropy.sharding import TENSORS, ShardedCall, sharded_call


class Division(NamedTuple):
    """Hold the arguments that say how the classes are divided over ranks."""

    group: Any = None
    first_class: int | None = None
    num_classes: int | None = None
    tokens_sharded: bool = False


def own_heads(
    heads: Heads, division: Division
) -> tuple[Heads, VocabShard | None, Callable[[Tensor, bool], Tensor]]:
    """Return this rank's heads, their place, and what makes a result of the kind of student_input.

    The place is None, and the heads are those passed, if no classes are divided.
    """
    calls = []
    for side, ignored in (("student", heads.ignored), ("teacher", None)):
        input, weight, bias = getattr(heads, side)
        for name, parameter in ((f"{side}_weight", weight), (f"{side}_bias", bias)):
            _check_parameter(name, parameter)
        tensors = dict.fromkeys(TENSORS) | {"input": input, "linear_weight": weight, "linear_bias": bias}
        with _named_after(side):
            calls.append(sharded_call({**tensors, "target": ignored}, **division._asdict()))
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
    return own, student.shard, lambda result, by_row: student.returned(result, by_row=by_row)


def _check_parameter(name: str, parameter: Any) -> None:
    """Raise for a parameter that FSDP2 or lowtide.shard_head divides: its ranks have tokens of their own."""
    check_whole(name, parameter)
    refuse_unreduced(name, parameter)
    check_gathered(name, parameter)
    refuse_derived(name, parameter)


@contextlib.contextmanager
def _named_after(side: str) -> Iterator[None]:
    """Let an error name the arguments of distillation."""
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
