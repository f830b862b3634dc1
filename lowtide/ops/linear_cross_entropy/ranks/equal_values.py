"""Compare the tensors that must be equal on all ranks; no host waits for a device.

Hosts compare the tensors on the CPU, as text. Of tensors on a device, the ranks gather
fingerprints. If these differ, the call's results become NaN on all ranks: the caller of `compare`
or `differ` overwrites arguments or losses with NaN, or targets with an invalid class. A host learns
of the difference later. The group's next call then raises an error on all ranks, which names the
tensor that differed.

Shapes: n numbers of a tensor; k tensors.
"""

import ctypes
import hashlib
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core.collectives import Group
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.definition import head

BY_ROW = (*head.BY_ROW, "ignored")  # tensors with an entry per row; distillation has "ignored"
INTEGERS = {1: torch.uint8, 2: torch.int16}  # by bytes of an element; wider ones are read as int32
FACTOR = 0x9E3779B97F4A7C15 - 2**64  # the odd constant of SplitMix64, whose bits look random


class _Answer(NamedTuple):
    """Hold the result of a comparison, which the host may read once the event `reached` is over."""

    names: tuple[str, ...]
    differ_k: Tensor
    reached: Any  # a torch.Event


# For each process group, the answers that this host has not read yet.
_answers: weakref.WeakKeyDictionary[Any, list[_Answer]] = weakref.WeakKeyDictionary()


def differ(group: Group, tensors: dict[str, Tensor]) -> Tensor:
    """Return True, as a 0-d tensor, if one of the tensors has other numbers on some rank."""
    differ_k = compare(group, tensors)
    tell_hosts(group, tuple(tensors), differ_k)
    return differ_k.any()


def compare(group: Group, tensors: dict[str, Tensor]) -> Tensor:  # [k]
    """Return True for each of the tensors that has other numbers on some rank."""
    own_k = torch.stack([fingerprint(each) for each in tensors.values()])
    return (group.gather(own_k)() != own_k).any(0)


def on_device(tensors: dict[str, Tensor | None]) -> dict[str, Tensor]:
    """Return those of the tensors that the device compares."""
    return {name: each for name, each in tensors.items() if each is not None and not each.is_cpu}


def texts(tensors: dict[str, Tensor | None]) -> dict[str, str]:
    """Return those of the tensors that the hosts compare, as text."""
    return {name: _text_of(each) for name, each in tensors.items() if each is not None and each.is_cpu}


def _text_of(tensor: Tensor) -> str:
    """Return a number as text, in which NaN equals NaN, or a hash of the tensor's bytes."""
    own = tensor.detach().contiguous()
    if own.dim() == 0:
        return repr(own.item())
    # Not by NumPy, which has no bfloat16.
    return hashlib.blake2b(ctypes.string_at(own.data_ptr(), own.nbytes), digest_size=16).hexdigest()


def fingerprint(tensor: Tensor) -> Tensor:
    """Return a hash of the tensor's bits and their places, as a 0-d integer.

    The bits are read as integers of at most 32 bits. The hash is the sum, modulo 2^64, of each
    integer times a factor that depends on its place. The factors look random. So two tensors that
    differ have the same hash with a probability of at most 2^-32. The worst case is a difference in
    the highest bit of 32-bit integers alone.
    """
    number = INTEGERS.get(tensor.element_size(), torch.int32)
    bits_n = tensor.detach().flatten().contiguous().view(number)
    factor_n = torch.arange(1, len(bits_n) + 1, device=tensor.device).mul_(FACTOR)
    factor_n = (factor_n ^ (factor_n >> 29)).mul_(FACTOR)
    return factor_n.mul_(bits_n).sum()


def differed(group: Group) -> list[str]:
    """Return the names of tensors that differed in an earlier call, as far as this host knows."""
    answers = _answers.get(group.group, []) if group.size > 1 else []
    if _captured():  # while a graph is captured, the host may not query an event
        return []
    while answers and answers[0].reached.query():
        answer = answers.pop(0)
        names = [name for name, differs in zip(answer.names, answer.differ_k.tolist()) if differs]
        if names:
            return names
    return []


def raise_difference(group: Group, names: list[str]) -> None:
    """Raise the error for tensors that differed in an earlier call; drop the group's answers."""
    _answers.pop(group.group, None)
    raise ArgumentError(f"{sentence(names[0])} (in an earlier call, whose results are NaN)")


def sentence(name: str) -> str:
    """Return the error message for a tensor whose numbers differ between ranks."""
    if name not in BY_ROW:
        return f"{name} must be the same on all ranks of the group, got other numbers on some"
    return (
        f"{name} must be the same on all ranks of the group, where input is replicated, "
        "got others on some; if each rank has tokens of its own, pass tokens_sharded=True"
    )


def tell_hosts(group: Group, names: tuple[str, ...], differ_k: Tensor) -> None:
    """Start to copy an answer to the host, which does not wait for it."""
    if _captured():
        return  # a replay of the graph would overwrite the answer that the host reads
    pinned_k = torch.empty_like(differ_k, device="cpu", pin_memory=True)
    reached = torch.Event(differ_k.device.type)
    pinned_k.copy_(differ_k, non_blocking=True)
    reached.record()
    _answers.setdefault(group.group, []).append(_Answer(names, pinned_k, reached))


def _captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
