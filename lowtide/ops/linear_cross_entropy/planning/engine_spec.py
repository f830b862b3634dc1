"""Define what planning asks each engine; spec.py in the engine's folder answers it."""

from collections.abc import Callable
from typing import NamedTuple

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess


class EngineSpec(NamedTuple):
    """Say which calls an engine runs, and what it holds meanwhile."""

    unsupported_reason: Callable[[Call, str], str | None]
    """Return why the engine cannot run a call on a backend, as `lowtide doctor` says, or None."""
    memory: Callable[[Call, OperandAccess], ByteCounts]
    """Return the bytes that each part of a call takes."""
    takes_shards: bool = False
    """True if it runs a head whose classes are divided over ranks or into segments."""
