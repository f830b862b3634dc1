"""Remember decisions about a call, and return them for calls that are alike.

A training run repeats its calls, and deciding takes the host longer than a small call takes the
device.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowtide.core.strides import address, place
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.operands import TILED

Decision = TypeVar("Decision")

# The most calls that one memory holds, at about 2 KiB each. A full memory is cleared.
MOST_CALLS = 512

_memories: list[dict[Hashable, Any]] = []


def memory() -> dict[Hashable, Any]:
    """Return a new memory for decisions, which `forget` clears."""
    _memories.append({})
    return _memories[-1]


def keep(known: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """Store a decision; clear the memory first if it is full."""
    if len(known) >= MOST_CALLS:
        known.clear()
    known[key] = found


def remembered(decide: Callable[[Call], Decision]) -> Callable[[Call], Decision]:
    """Let a function of a call decide once for all calls that are alike.

    All of them get the same object, so it must hold no tensor, and nobody may change it.
    """
    known: dict[Hashable, Decision] = memory()

    @functools.wraps(decide)
    def look_up(call: Call) -> Decision:
        key = _likeness(call)
        if key is None:
            return decide(call)
        found = known.get(key)  # threads need no lock, since each operation on `known` is atomic
        if found is None:
            found = decide(call)
            keep(known, key, found)
        return found

    return look_up


def forget() -> None:
    """Clear all memories, after a change of something that decides and that keys do not hold."""
    for known in _memories:
        known.clear()


def _likeness(call: Call) -> Hashable:
    """Return a key that is equal for calls that are alike, or None if none can be made.

    None can be made for fake tensors and other subclasses, nor while a graph is traced. Their sizes
    may be symbols, and a comparison of symbols would divide one graph into several.
    """
    if torch.compiler.is_compiling():
        return None
    # A tensor map needs a tensor that begins at a multiple of 8 elements. The choice of an engine
    # goes by the storage offset, its later use by the address (core/strides.py).
    begins = address if call.options.engine in TILED else place
    layouts: list[Hashable] = []
    for each in call.head.tensors:
        if each is None:
            layouts.append(None)
        elif type(each) is Tensor or type(each) is nn.Parameter:
            layouts.append((each.shape, each.stride(), each.dtype, each.device, begins(each) % 8))
        else:
            return None
    # Engines that use a CPU's units need the GEMMs of oneDNN, which the caller can switch off.
    return (*layouts, call.options, call.call_kind, call.rank_tokens, torch.backends.mkldnn.enabled)
