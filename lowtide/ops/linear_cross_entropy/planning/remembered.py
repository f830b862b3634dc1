"""Remember what was decided for a call, and return it for calls that are alike.

A training run makes the same calls again and again, and to decide takes the host longer than a
small call takes the device.
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

# Calls that a function remembers, at about 2 KiB each. With more it begins again.
MOST_CALLS = 512

_memories: list[dict[Hashable, Any]] = []


def memory() -> dict[Hashable, Any]:
    """Return memory for decisions, which `forget` clears."""
    _memories.append({})
    return _memories[-1]


def keep(known: dict[Hashable, Any], key: Hashable, found: Any) -> None:
    """Keep what was decided, in memory that does not grow without end."""
    if len(known) >= MOST_CALLS:
        known.clear()
    known[key] = found


def remembered(decide: Callable[[Call], Decision]) -> Callable[[Call], Decision]:
    """Let a function of a call decide once for all calls that are alike.

    These share what it returns, which may hold no tensor and may not be changed.
    """
    known: dict[Hashable, Decision] = memory()

    @functools.wraps(decide)
    def look_up(call: Call) -> Decision:
        key = _likeness(call)
        if key is None:
            return decide(call)
        found = known.get(key)  # threads need no lock: each of these steps is a single one
        if found is None:
            found = decide(call)
            keep(known, key, found)
        return found

    return look_up


def forget() -> None:
    """Forget all that was decided, where something else changes that it depends on."""
    for known in _memories:
        known.clear()


def _likeness(call: Call) -> Hashable:
    """Return what two calls have in common if they are alike, or None if it cannot be told.

    It cannot be told of fake tensors and other subclasses, nor while a graph is traced: their sizes
    may be symbols, and a look at these would divide one graph into several.
    """
    if torch.compiler.is_compiling():
        return None
    # Where a tensor begins matters to tensor maps: for the choice of an engine, and when it runs.
    begins = address if call.options.engine in TILED else place
    layouts: list[Hashable] = []
    for each in call.head.tensors:
        if each is None:
            layouts.append(None)
        elif type(each) is Tensor or type(each) is nn.Parameter:
            layouts.append((each.shape, each.stride(), each.dtype, each.device, begins(each) % 8))
        else:
            return None
    # The products of cpu_exponentials are oneDNN's, which can be switched off.
    return (*layouts, call.options, call.call_kind, call.rank_tokens, torch.backends.mkldnn.enabled)
