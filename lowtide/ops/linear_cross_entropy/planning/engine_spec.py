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
    shard_token_bytes: Callable[[Call, ByteCounts], int] | None = None
    """Return the bytes per token of a chunk where classes are divided over ranks or into segments.

    The counts are those of `memory`. None if the engine runs no such head.
    """
