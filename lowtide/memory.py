"""Measure the peak memory of a block of code, from the allocator itself:

    with peak_memory("cpu") as peak:
        loss.backward()
    peak.bytes     # high-water mark above what was held on entry
    peak.largest   # the largest single allocation

CUDA's figures come from the trace of the caching allocator, the CPU's from the profiler's
allocation events. Both count the bytes requested by tensors and by temporaries inside an operator,
including those of the backward pass's thread, so that no kernel's allocation is missed. Python's
garbage collector is off meanwhile. `cpu_allocations` lists the CPU's events one by one.
"""

import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile


@dataclass
class Peak:
    """Hold the bytes at the highest moment, and those of the largest single allocation."""

    bytes: int = 0
    largest: int = 0


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Measure the peak memory of a block on `device`; the result is complete at its end."""
    peak = Peak()
    measure = _cuda if torch.device(device).type == "cuda" else _cpu
    with _garbage_waits(), measure(peak):
        yield peak


@contextlib.contextmanager
def _garbage_waits() -> Iterator[None]:
    """Stop Python's collector of reference cycles during the block.

    Memory from before the block that it freed would be subtracted from the peak. Collecting
    everything beforehand takes a tenth of a second, longer than many a step.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@dataclass(frozen=True)
class Allocation:
    """Describe one allocation, or one release, on the CPU."""

    time_ns: int
    address: int
    bytes: int  # Negative for a release.
    operators: tuple[str, ...]  # It happened in these, the outermost first.


# Scopes that are recorded besides allocations. Operators are several times as many as allocations.
OPERATORS: set[Any] = set()  # An empty set records all.
NOTHING = {RecordScope.STATIC_RUNTIME_MODEL}  # No operator has this scope.


@contextlib.contextmanager
def cpu_allocations(scopes: set[Any] = OPERATORS) -> Iterator[list[Allocation]]:
    """List all allocations and releases of the block on the CPU; the list is filled at its end."""
    profiler = profile(use_kineto=True, profile_memory=True)
    config, activities = profiler.config(), profiler.kineto_activities
    found: list[Allocation] = []
    with _stderr_silenced():
        _prepare_profiler(config, activities)
        _enable_profiler(config, activities, scopes)  # type: ignore[call-arg]  # not in torch's stub
    try:
        yield found
    finally:
        with _stderr_silenced():
            results = _disable_profiler()
        waiting: list[tuple[Any, tuple[str, ...]]] = [
            (event, ()) for event in reversed(results.experimental_event_tree())
        ]
        while waiting:
            event, operators = waiting.pop()
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, operators))
            else:
                within = (*operators, event.name)
                waiting += [(child, within) for child in reversed(event.children)]
        found.sort(key=lambda each: each.time_ns)


@contextlib.contextmanager
def _cpu(peak: Peak) -> Iterator[None]:
    allocations: list[Allocation] = []
    try:
        with cpu_allocations(NOTHING) as allocations:
            yield
    finally:
        held = 0
        for each in allocations:
            held += each.bytes
            peak.bytes = max(peak.bytes, held)
            peak.largest = max(peak.largest, each.bytes)


@contextlib.contextmanager
def _cuda(peak: Peak) -> Iterator[None]:
    # Autograd's thread keeps its last tensors until the next backward pass: run one.
    with torch.enable_grad():
        torch.zeros((), device="cuda", requires_grad=True).neg().backward()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, clear_history=True)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        peak.bytes = torch.cuda.max_memory_allocated() - held
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        torch.cuda.memory._record_memory_history(enabled=None)
        peak.largest = max((entry["size"] for entry in trace if entry["action"] == "alloc"), default=0)


@contextlib.contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Silence file descriptor 2: the profiler's C++ side prints a line when it starts or stops."""
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as devnull:
        os.dup2(devnull.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
