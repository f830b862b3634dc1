"""Exchange messages between the hosts of the ranks of a group, among them errors.

A message has a fixed size. It moves between the hosts: a host waits for the other hosts, and never
for its device. A rank that raises an error where others wait for its message sends the error in the
message's place, and all ranks raise.
"""

import contextlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.collectives import Group
from lowtide.core.compile_ahead.notes import in_rehearsal
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.ranks import equal_values

MESSAGE_BYTES = 2048

CALL = "the call that backward belongs to"
SAME_CALLS = (
    "each rank must make the same calls, and its loss must use the results of each, if only times 0, for "
    "backward moves tensors as well"
)

_count = 0  # calls that agreed or told an error; by it, `telling_errors` knows whether its call did so


def next_number() -> int:
    """Count a call that exchanges messages, and return its number."""
    global _count
    _count += 1
    return _count


@contextlib.contextmanager
def telling_errors(name: str) -> Iterator[None]:
    """Tell the other ranks of an error of this block, if they wait for this one in `exchange`."""
    before = _count
    try:
        yield
    except Exception as error:
        if _count == before:
            next_number()
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
    exchange(Group(name), {"operator": "a loss of deferred logits"})


def _tell(name: str, error: Exception) -> None:
    exchange(Group(name), {"error": f"{type(error).__name__}: {error}"})


def exchange(group: Group, message: dict[str, Any], terms: str = "") -> list[dict[str, Any]]:
    """Return the messages of all ranks; raise if another rank sent an error and this one did not.

    `terms`, a line of text, reaches the others as it is, as an entry of the message.
    """
    if group.size == 1:
        return [message | {"terms": terms}]
    if in_rehearsal():
        raise RuntimeError("a rehearsal, of which the other ranks know nothing, would speak to them")
    if "error" in message:
        message = {"error": message["error"][: MESSAGE_BYTES // 8]}  # JSON may take six bytes a character
    with torch_private.outside_transforms():
        gathered = _gathered(group, _encoded(message, terms), message.get("operator", "an error"))
        numbers = gathered.view(torch.int64).flatten().tolist()  # as whole words, of which there are few
    text = struct.pack(f"={len(numbers)}q", *numbers)
    ranks = [_decoded(text[place : place + MESSAGE_BYTES]) for place in range(0, len(text), MESSAGE_BYTES)]
    if "error" not in message:
        _check_messages(ranks)
    return ranks


def _encoded(message: dict[str, Any], terms: str) -> Tensor:
    text = f"{json.dumps(message)}\n{terms}".encode().ljust(MESSAGE_BYTES, b"\0")
    assert len(text) == MESSAGE_BYTES, "the message is longer than MESSAGE_BYTES"
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
    check_equal([{"operator": each["operator"]} for each in ranks])


def check_equal(ranks: Sequence[dict[str, Any]]) -> None:
    """Raise unless all ranks have the same value under each name."""
    for name in ranks[0]:
        found = [each.get(name) for each in ranks]
        if any(each != found[0] for each in found):
            if name in equal_values.BY_ROW:
                raise ArgumentError(equal_values.sentence(name))
            listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(found))
            advice = f"; {SAME_CALLS}" if name in ("operator", CALL) else ""
            raise ArgumentError(f"{name} must be the same on all ranks of the group, got {listed}{advice}")
