"""Record all that a block of code allocates, in the format of torch.cuda.memory._snapshot().

    with recording("cpu") as record:
        loss.backward()
    record.snapshot  # pytorch.org/memory_viz opens it, pickled

On CUDA the snapshot is the caching allocator's own. On the CPU it is made from the profiler's
allocation events. malloc has no segments, so every block is its own segment, and frames are
operators instead of lines.
"""

import contextlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lowtide.memory import Allocation, cpu_allocations
from lowtide.tools import files

MAX_EVENTS = 1_000_000
PICKLE_PROTOCOL = 4  # The latest protocol that the viewer reads.


@dataclass
class Record:
    snapshot: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def recording(device: str) -> Iterator[Record]:
    """Yield a record, which is complete when the block ends, even with an exception."""
    record = Record()
    with (_cuda if device == "cuda" else _cpu)(record):
        yield record


@contextlib.contextmanager
def _cuda(record: Record) -> Iterator[None]:
    memory = torch.cuda.memory
    memory._record_memory_history(max_entries=MAX_EVENTS, stacks="python", clear_history=True)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        record.snapshot = memory._snapshot()
        memory._record_memory_history(enabled=None)


@contextlib.contextmanager
def _cpu(record: Record) -> Iterator[None]:
    allocations: list[Allocation] = []
    try:
        with cpu_allocations() as allocations:
            yield
    finally:
        record.snapshot = as_snapshot(allocations)


def as_snapshot(allocations: Sequence[Allocation]) -> dict[str, Any]:
    """Return the allocations as a snapshot.

    Allocations before the recording are left out, since the profiler does not report when they end.
    """
    trace: list[dict[str, Any]] = []
    blocks: dict[int, dict[str, Any]] = {}  # Blocks by address; at the end, those that are still held.
    for each in allocations:
        event = {
            "addr": each.address,
            "size": abs(each.bytes),
            "stream": 0,
            "time_us": each.time_ns // 1000,
            "frames": [{"filename": "", "line": 0, "name": name} for name in reversed(each.operators)],
        }
        if each.bytes > 0:
            blocks[each.address] = event
            trace += [event | {"action": action} for action in ("segment_alloc", "alloc")]
        else:
            blocks.pop(each.address, None)
            actions = ("free_requested", "free_completed", "segment_free")
            trace += [event | {"action": action} for action in actions]
    return {"device_traces": [trace], "segments": [_segment(block) for block in blocks.values()]}


def _segment(event: dict[str, Any]) -> dict[str, Any]:
    address, size = event["addr"], event["size"]
    block = {
        "address": address,
        "size": size,
        "requested_size": size,
        "state": "active_allocated",
        "frames": event["frames"],
    }
    return {
        "device": 0,
        "address": address,
        "total_size": size,
        "allocated_size": size,
        "active_size": size,
        "requested_size": size,
        "stream": 0,
        "segment_type": "large",
        "frames": event["frames"],
        "blocks": [block],
    }


def save(snapshot: dict[str, Any], path: Path) -> None:
    with files.whole_file(path) as file:
        pickle.dump(snapshot, file, PICKLE_PROTOCOL)
