"""Let the ranks of a sharded call agree, before their first collective of data.

Each rank must issue the same collectives, of the same sizes, or all of them wait for ever. So each
says in a message of a fixed size what it was called with. All ranks then raise the same error, or
all go on with the smallest of their chunks. A rank that raises an error before that sends the error
in place of its message.

Every call exchanges messages, since no rank knows whether the others have changed theirs. They move
between the hosts: a host waits for the other hosts, and never for its device. Numbers that only the
device knows are compared there (equal_values.py).

Shapes: V classes of all ranks; P parts of the classes, whose statistics are kept apart.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lowtide.core.collectives import Group
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels, Options, VocabShard, rows_of
from lowtide.ops.linear_cross_entropy.planning import equal_values
from lowtide.ops.linear_cross_entropy.planning.call import CallKind

MESSAGE_BYTES = 2048

CALL = "the call that backward belongs to"
MEAN_OF_LOSSES = "backward of a loss of lowtide.shard_head"
FACTOR = "the factor by which a loss of lowtide.shard_head is scaled"
SAME_CALLS = (
    "each rank must make the same calls, and its loss must use the results of each, if only times 0, for "
    "backward moves tensors as well"
)


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
    """What must be equal on all ranks, by name."""
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
        with telling_errors(shard.group):  # in a compiled graph, the call is not in such a block
            own["rows"] = call.rows_for(call.tokens)
        self.operator = call.operator
        self.text = json.dumps({"equal": equal | call.equal, "own": own, "upstream": upstream})
        self.known: tuple[list[str], Agreement] | None = None
        """The last texts of all ranks, and what they agreed on."""

    def agree(
        self,
        tensors: dict[str, Tensor | None],
        rows_for: Callable[[int], int],
        number: int | None = None,
    ) -> tuple[Agreement, int]:
        """Return what the ranks agree on, and the call's number; all of them raise if they differ.

        The arguments are those of `OwnCall`. Of tensors on a device, the numbers are not compared.
        As long as all ranks say the same again, the agreement is the same object.
        """
        global _count
        _count += 1
        message = {
            "operator": self.operator,
            "call": {CALL: number},
            "equal": equal_values.texts(tensors),
            "count": _count,
            "differed": equal_values.differed(self.group),
        }
        ranks = _exchange(self.group, message, self.text)
        for each in ranks:
            if each["differed"]:  # some hosts know of the difference now, the others soon
                equal_values.raise_difference(self.group, each["differed"])
        texts = [each["terms"] for each in ranks]
        if self.known is None or self.known[0] != texts:
            terms = [json.loads(each) for each in texts]
            _check_equal([each["call"] | its["equal"] | each["equal"] for each, its in zip(ranks, terms)])
            agreement = self._agreement([each["own"] for each in terms], rows_for, terms)
            if len({*agreement.tokens}) == 1:  # else all ranks exchange a second message each time
                self.known = texts, agreement
        else:
            _check_equal([each["call"] | each["equal"] for each in ranks])
            agreement = self.known[1]
        return agreement, max(each["count"] for each in ranks)

    def _agreement(
        self, ranks: list[dict[str, int]], rows_for: Callable[[int], int], terms: list[dict[str, Any]]
    ) -> Agreement:
        group, shard = self.group, self.shard
        layout = [(each["first_class"], each["classes"]) for each in ranks]
        check_layout(layout, shard)
        counts = [len(shard.parts_of(*each)) for each in layout]
        most, rows, tokens = max(counts), [each["rows"] for each in ranks], [each["tokens"] for each in ranks]
        if len({*tokens}) > 1:  # otherwise a rank with few tokens would make all ranks take small chunks
            with telling_errors(shard.group):
                message = {"operator": self.operator, "rows": rows_for(max(tokens))}
            rows = [each["rows"] for each in _exchange(group, message)]
        step = group.size if shard.tokens_sharded else 1  # a chunk has as many tokens of each rank
        places = [
            place
            for _, place in sorted(
                (first + part.start, rank * most + number)
                for rank, (first, classes) in enumerate(layout)
                for number, part in enumerate(shard.parts_of(first, classes))
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


_count = 0  # calls that agreed or told an error; by it, `telling_errors` knows whether its call did so


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


@contextlib.contextmanager
def telling_errors(name: str) -> Iterator[None]:
    """Tell the other ranks of an error of this block, if they wait for this one in `agree`."""
    global _count
    before = _count
    try:
        yield
    except Exception as error:
        if _count == before:
            _count += 1
            _tell(name, error)
        raise


@contextlib.contextmanager
def raising_together(name: str) -> Iterator[None]:
    """Raise an error of this block on all ranks, each of which waits for the others at its end.

    It must not be opened where `agree` is called.
    """
    try:
        yield
    except Exception as error:
        _tell(name, error)
        raise
    _exchange(Group(name), {"operator": "a loss of deferred logits"})


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
    message: dict[str, Any] = {"operator": MEAN_OF_LOSSES, "equal": {CALL: number}}
    if own.is_cpu:
        message["gradient"] = own.item()
    ranks = _exchange(group, message)
    _check_equal([each["equal"] for each in ranks])
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


def _tell(name: str, error: Exception) -> None:
    _exchange(Group(name), {"error": f"{type(error).__name__}: {error}"})


def facts_of(head: Head, labels: Labels, options: Options, call_kind: CallKind) -> dict[str, Any]:
    """Return what must be equal on all ranks of a call of the loss, by name, for JSON."""
    own = ("few_tokens", "dense", "compute_dtype", "workspace", "backend", *VocabShard._fields)
    given = {"linear_bias": head.bias, "logit_scale": head.scale, **labels._asdict()}
    facts = {name: value for name, value in options._asdict().items() if name not in own}
    facts["input's features"] = [each.shape[-1] for each in head.inputs]
    facts["input's dtype"] = str(options.compute_dtype)
    facts["arguments"] = [name for name, each in given.items() if each is not None]
    facts["class probabilities"] = call_kind.probabilities
    facts["requires_grad of input, linear_weight, linear_bias, logit_scale"] = [*call_kind.needs_grad.all]
    return facts


def equal_tensors_of(
    head: Head, labels: Labels, options: Options, call_kind: CallKind
) -> dict[str, Tensor | None]:
    """Return the tensors whose numbers must be equal on all ranks of a call, by name."""
    if options.ranks == 1:
        return {}
    tensors = {"normalizer": labels.normalizer, "logit_scale": head.scale}
    if options.tokens_sharded:
        return tensors
    by_row = rows_of(labels)
    target = by_row.pop("target")
    if not call_kind.probabilities:  # each rank has probabilities of its own classes only
        by_row["target"] = target.long()
    return tensors | by_row


def _exchange(group: Group, message: dict[str, Any], terms: str = "") -> list[dict[str, Any]]:
    """Return the messages of all ranks; raise if only others sent an error.

    `terms`, a line of text, reaches the others as it is, as an entry of the message.
    """
    if group.size == 1:
        return [message | {"terms": terms}]
    if "error" in message:
        message = {"error": message["error"][: MESSAGE_BYTES // 8]}  # JSON may take six bytes a character
    gathered = _gathered(group, _encoded(message, terms), message.get("operator", "an error"))
    ranks = [_decoded(bytes(each)) for each in gathered.tolist()]
    if "error" not in message:
        _check_messages(ranks)
    return ranks


def _encoded(message: dict[str, Any], terms: str) -> Tensor:
    text = f"{json.dumps(message)}\n{terms}".encode().ljust(MESSAGE_BYTES, b"\0")
    assert len(text) == MESSAGE_BYTES, "the message has no room for what a call is told by"
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _decoded(text: bytes) -> dict[str, Any]:
    message, terms = text.rstrip(b"\0").decode().split("\n")
    return {**json.loads(message), "terms": terms}


def _gathered(group: Group, mine: Tensor, place: str) -> Tensor:
    """Return the bytes of all ranks."""
    try:
        return group.of_hosts.gather(mine)()
    except RuntimeError as error:  # the backend raises it if a rank has ended or the group's timeout is over
        raise RuntimeError(f"{error} (this rank waited for the others in {place}; {SAME_CALLS})") from error


def _check_messages(ranks: Sequence[dict[str, Any]]) -> None:
    """Raise if a rank sent an error, or if the ranks are in different operators."""
    for rank, other in enumerate(ranks):
        if "error" in other:
            raise ArgumentError(f"rank {rank} of the group raised an error in this call: {other['error']}")
    _check_equal([{"operator": each["operator"]} for each in ranks])


def _check_equal(ranks: Sequence[dict[str, Any]]) -> None:
    for name in ranks[0]:
        found = [each.get(name) for each in ranks]
        if any(each != found[0] for each in found):
            if name in equal_values.BY_ROW:
                raise ArgumentError(equal_values.sentence(name))
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(found))
            advice = f"; {SAME_CALLS}" if name in ("operator", CALL) else ""
            raise ArgumentError(f"{name} must be the same on all ranks of the group, got {listed}{advice}")


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
