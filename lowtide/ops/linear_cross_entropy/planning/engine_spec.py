"""Define what planning asks each engine; spec.py in the engine's folder answers it."""

from collections.abc import Callable
from typing import NamedTuple

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess


class EngineSpec(NamedTuple):
    """Say which calls an engine can run, and how many bytes it holds during a call."""

    unsupported_reason: Callable[[Call, str], str | None]
    """Return why the engine cannot run a call on a backend, or None if it can.

    `lowtide doctor` prints the reason.
    """
    memory: Callable[[Call, OperandAccess], ByteCounts]
    """Return the bytes that each part of a call takes."""
    shard_token_bytes: Callable[[Call, ByteCounts], int] | None = None
    """Return the bytes per token of a chunk where classes are divided over ranks or into segments.

    The counts are those that `memory` returns. The function is None if the engine runs no such
    head.
    """
