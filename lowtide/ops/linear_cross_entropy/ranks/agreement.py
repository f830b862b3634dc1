"""Let the ranks of a sharded call agree, before their first collective of data.

Each rank must issue the same collectives, of the same sizes, or all of them wait for ever. So each
says in a message (messages.py) what it was called with. All ranks then raise the same error, or all
go on with the smallest of their chunks.

Every call exchanges messages, since no rank knows whether the others have changed theirs. Numbers
that only the device knows are compared there (equal_values.py).

Shapes: V classes of all ranks; P parts of the classes, whose statistics are kept apart.
"""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.core.collectives import Group
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard
from lowtide.ops.linear_cross_entropy.ranks import equal_values, messages

MEAN_OF_LOSSES = "backward of a loss of lowtide.shard_head"
FACTOR = "the factor by which a loss of lowtide.shard_head is scaled"


@dataclass(frozen=True)
class OwnCall:
    """Hold what a rank tells the others of its call."""

    operator: str
    shard: VocabShard
    classes: int
    """The classes of this rank."""
    tokens: int
    device: torch.device
    equal: dict[str, Any]
    """Holds what must be equal on all ranks, by name."""
    equal_tensors: dict[str, Tensor | None]
    """The tensors whose numbers must be equal on all ranks, by name."""
    rows_for: Callable[[int], int]
    """Returns the rows per chunk that this rank would take, from the tokens of a rank."""
    upstream: dict[str, bool] = field(default_factory=dict)
    """True for each result that has an upstream gradient here, in a backward."""
    number: int | None = None
    """The number of the call that a backward belongs to.

    The ranks' backward of two calls of one shape would otherwise sum each other's gradients.
    """

    @property
    def group(self) -> Group:
        return Group(self.shard.group)

    @property
    def compared_on_device(self) -> tuple[str, ...]:
        """Return the names of the tensors that the device compares."""
        return tuple(equal_values.on_device(self.equal_tensors))


@dataclass(frozen=True)
class Agreement:
    """Hold what the ranks know of each other."""

    group: Group
    rows: int
    """Tokens per chunk."""
    tokens: tuple[int, ...]
    """The tokens of each rank."""
    most_parts: int
    """The most parts of the classes that a rank holds; each gathers so many."""
    order_P: Tensor | None
    """The place of each part among those gathered, in the order of classes; None if it is that."""
    upstream: tuple[bool, ...]
    """True for each result that has an upstream gradient on some rank, in a backward."""
    number: int = 0
    """The number of this call, the same on all ranks; a group's later call has a larger one."""


class Terms:
    """Hold what a rank tells of a call and of those that are like it, and what ranks agree on.

    It holds no tensor of a call.
    """

    def __init__(self, call: OwnCall) -> None:
        shard, upstream = call.shard, [*call.upstream.values()]
        self.group, self.shard, self.device = call.group, shard, call.device
        names = ("ranks", "num_classes", "tokens_sharded", "segments")
        equal: dict[str, Any] = {name: getattr(shard, name) for name in names}
        if not shard.tokens_sharded:
            equal["input's tokens"] = call.tokens
            equal[f"upstream gradients of {', '.join(call.upstream)}"] = upstream
        equal["arguments on a device"] = [*call.compared_on_device]
        own = {"first_class": shard.first_class, "classes": call.classes, "tokens": call.tokens}
        with messages.telling_errors(shard.group):  # in a compiled graph, the call is not in such a block
            own["rows"] = call.rows_for(call.tokens)
        self.operator = call.operator
        self.text = json.dumps({"equal": equal | call.equal, "own": own, "upstream": upstream})
        self.known: tuple[list[str], Agreement] | None = None
        """Holds the last texts of all ranks, and what they agreed on."""

    def agree(
        self, tensors: dict[str, Tensor | None], rows_for: Callable[[int], int], number: int | None = None
    ) -> tuple[Agreement, int]:
        """Return what the ranks agree on, and the call's number; all of them raise if they differ.

        The arguments are those of `OwnCall`. Of tensors on a device, the numbers are not compared.
        As long as all ranks say the same again, the agreement is the same object.
        """
        message = {
            "operator": self.operator,
            "call": {messages.CALL: number},
            "equal": equal_values.texts(tensors),
            "count": messages.next_number(),
            "differed": equal_values.differed(self.group),
        }
        ranks = messages.exchange(self.group, message, self.text)
        for each in ranks:
            if each["differed"]:  # some hosts know of the difference now, the others soon
                equal_values.raise_difference(self.group, each["differed"])
        texts = [each["terms"] for each in ranks]
        known = self.known  # read once, for another thread may replace it
        if known is None or known[0] != texts:
            terms = [json.loads(each) for each in texts]
            messages.check_equal(
                [each["call"] | its["equal"] | each["equal"] for each, its in zip(ranks, terms)]
            )
            agreement = self._agreement([each["own"] for each in terms], rows_for, terms)
            if len({*agreement.tokens}) == 1:  # else all ranks exchange a second message each time
                self.known = texts, agreement
        else:
            messages.check_equal([each["call"] | each["equal"] for each in ranks])
            agreement = known[1]
        return agreement, max(each["count"] for each in ranks)

    def _agreement(
        self, ranks: list[dict[str, int]], rows_for: Callable[[int], int], terms: list[dict[str, Any]]
    ) -> Agreement:
        group, shard = self.group, self.shard
        layout = [(each["first_class"], each["classes"]) for each in ranks]
        check_layout(layout, shard)
        counts = [len(shard.parts_of(classes)) for _, classes in layout]
        most, rows, tokens = max(counts), [each["rows"] for each in ranks], [each["tokens"] for each in ranks]
        if len({*tokens}) > 1:  # otherwise a rank with few tokens would make all ranks take small chunks
            with messages.telling_errors(shard.group):
                message = {"operator": self.operator, "rows": rows_for(max(tokens))}
            rows = [each["rows"] for each in messages.exchange(group, message)]
        step = group.size if shard.tokens_sharded else 1  # a chunk has as many tokens of each rank
        places = [
            place
            for _, place in sorted(
                (first + part.start, rank * most + number)
                for rank, (first, classes) in enumerate(layout)
                for number, part in enumerate(shard.parts_of(classes))
            )
        ]
        in_order = places == [*range(most * group.size)]
        return Agreement(
            group,
            max(min(rows) // step, 1) * step,
            tuple(tokens),
            most,
            None if in_order else _on_device(places, self.device),
            tuple(map(any, zip(*(each["upstream"] for each in terms)))),
        )


def agree(call: OwnCall) -> Agreement:
    """Return what the ranks agree on; all of them raise if their calls do not fit together."""
    agreement, number = Terms(call).agree(call.equal_tensors, call.rows_for, call.number)
    return replace(agreement, number=number)


def _on_device(places: list[int], device: torch.device) -> Tensor:
    if device.type == "cpu":
        return torch.tensor(places, device=device)
    return _kept_on_device(tuple(places), device)


@functools.lru_cache(maxsize=64)
def _kept_on_device(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the places; to copy them to the device at each call would be to wait for it."""
    return torch.tensor(places, device=device)


def agree_on_gradient(name: str, number: int, gradient: Tensor) -> Tensor:
    """Return the upstream gradient of a loss that the ranks share, if it is the same on all.

    `number` is that of the call in the group. If calls or gradients differ, all ranks raise. To
    read a gradient on a device, the host would have to wait. There the gradient becomes NaN if it
    differs, and a later call raises.
    """
    from torch._subclasses.fake_tensor import FakeTensor  # slow to import

    group = Group(name)
    if group.size == 1 or isinstance(gradient, FakeTensor):  # other ranks have no fake tensor
        return gradient
    own = gradient.detach().to(torch.float64)
    message: dict[str, Any] = {"operator": MEAN_OF_LOSSES, "equal": {messages.CALL: number}}
    if own.is_cpu:
        message["gradient"] = own.item()
    ranks = messages.exchange(group, message)
    messages.check_equal([each["equal"] for each in ranks])
    if not own.is_cpu:
        return gradient.masked_fill(equal_values.differ(group, {FACTOR: own}), torch.nan)
    gradients = [each["gradient"] for each in ranks]
    if len({*map(repr, gradients)}) > 1:  # compared as text, in which NaN equals NaN
        raise RuntimeError(
            "the loss of a head of lowtide.shard_head must be scaled by the same factor on all ranks, "
            f"which share the head's gradient, got upstream gradients {gradients}; pass "
            "normalizer= for counts, row_weight= for weights that differ, or take reduction='none'"
        )
    return gradient


def check_layout(layout: Sequence[tuple[int, int]], shard: VocabShard) -> None:
    """Raise unless the ranks hold each class once, and whole segments."""
    held = sorted(each for each in layout if each[1])
    ends = [0, *(first + classes for first, classes in held)]
    once = ends[-1] == shard.num_classes and all(first == end for (first, _), end in zip(held, ends))
    listed = ", ".join(
        f"[{first}, {first + classes}) on rank {rank}" for rank, (first, classes) in enumerate(layout)
    )
    if not once:
        raise ArgumentError(
            f"the shards must hold each of the num_classes ({shard.num_classes}) classes once, got classes "
            f"{listed}; pass each rank its own rows of the weight, and first_class, the class of the first"
        )
    size = shard.segment_classes if shard.segments else 1
    for first, classes in layout:
        last = first + classes
        if classes and (first % size or (last % size and last != shard.num_classes)):
            raise ArgumentError(
                f"the shards must be made of whole segments of {size} classes, as segments={shard.segments} "
                f"and num_classes={shard.num_classes} make them, got classes {listed}; choose segments that "
                "the number of ranks divides, and pad the weight to a multiple of segments"
            )
