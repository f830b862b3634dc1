"""Measure the memory that a block of code allocates, from the allocator itself.

CUDA's figures come from the trace of the caching allocator, the CPU's from the profiler's
allocation events. `peak_memory` is public; `cpu_allocations` lists the CPU's events one by one.
"""

import contextlib
import gc
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import profile

from lowtide.core.errors import ArgumentError, ArgumentTypeError


@dataclass
class Peak:
    """Hold the peak of a measured block, and its largest single allocation, in bytes."""

    bytes: int = 0
    largest: int = 0


_one_block = threading.Lock()


@contextlib.contextmanager
def peak_memory(device: torch.device | str) -> Iterator[Peak]:
    """Measure the peak memory of a block of code on one device.

    Example::

        with lowtide.peak_memory("cuda") as peak:
            loss = lowtide.linear_cross_entropy(hidden, weight, target)
            loss.backward()
        print(peak.bytes / 2**20, "MiB")  # weight.grad and hidden.grad included

    Args:
        device: "cpu", or a CUDA device; "cuda" is the current one.

    Yields:
        An object that is filled when the block ends, even by an exception:

        * `bytes`: the most that was held at a time, beyond what was held when the block began;
        * `largest`: the largest single allocation.

        Both are in bytes. CUDA's allocator holds multiples of 512 bytes, and `bytes` counts these.

    What counts: all that torch allocates on the device. That includes results and gradients that
    are still held when the block ends, temporaries inside an operator, and the backward pass.
    Memory that was held before and is released in the block lowers the level from which later
    allocations count on CUDA. On the CPU it does not, since torch does not know its size.

    On the CPU torch reports the thread of the block and those of the backward pass. What another
    thread allocates does not count. What another thread releases counts as held: a collective of
    gloo sometimes does so on a busy machine, and the least peak of some steps is then the true one.

    What does not count: memory of other devices; memory that torch does not allocate (NumPy, a
    CUDA context, another process); and what the caching allocator has reserved and not handed out.
    A first call may compile or tune; run the block once before, if that is not to count.

    Python's collector of reference cycles is off during the block. On CUDA the block begins and
    ends with a synchronisation, resets the peak statistics of `torch.cuda`, and ends a recording of
    `torch.cuda.memory` history.

    Raises:
        ValueError, TypeError: for a device that is neither a CPU nor CUDA.
        RuntimeError: within another `peak_memory`, on the CPU within torch's profiler, and for a
            CUDA device on a machine without one.
    """
    if not isinstance(device, (torch.device, str, int)):
        raise ArgumentTypeError(f"device must be a torch.device or its name, got {device!r}")
    try:
        place = torch.device(device)
    except RuntimeError:  # such as "gpu"
        raise ArgumentError(f"device must be the CPU or a CUDA device, got {device!r}") from None
    if place.type not in ("cpu", "cuda"):
        raise ArgumentError(
            f"device must be the CPU or a CUDA device, got {place}; torch traces the allocations of no other"
        )
    if place.type == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"peak_memory cannot measure {place}: torch sees no CUDA device here")
    if place.type == "cpu" and torch._C._autograd._profiler_enabled():
        raise RuntimeError("peak_memory uses torch's profiler on the CPU, and one is running; end it first")
    if not _one_block.acquire(blocking=False):
        raise RuntimeError("peak_memory measures one block at a time; end the other block first")
    peak = Peak()
    try:
        with _garbage_waits(), _cuda(peak, place) if place.type == "cuda" else _cpu(peak):
            yield peak
    finally:
        _one_block.release()


@contextlib.contextmanager
def _garbage_waits() -> Iterator[None]:
    """Stop Python's collector of reference cycles during the block.

    On CUDA, memory from before that it freed would be subtracted from the peak. Collecting
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


@contextlib.contextmanager
def cpu_allocations(operators: bool = True) -> Iterator[list[Allocation]]:
    """List all allocations and releases of the block on the CPU; the list is filled at its end.

    With `operators` each says the operators that it happened in, which are several times as many.
    """
    try:
        from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
        from torch._C._profiler import RecordScope, _EventType
    except ImportError as absent:
        raise RuntimeError(
            f"lowtide cannot see the CPU's allocations in torch {torch.__version__}: {absent}; upgrade "
            "lowtide, or use a release of torch that it is tested with"
        ) from absent
    # An empty set records all scopes; no operator has the other.
    scopes: set[Any] = set() if operators else {RecordScope.STATIC_RUNTIME_MODEL}
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
            event, around = waiting.pop()
            if event.tag == _EventType.Allocation:
                fields = event.extra_fields
                if fields.device.type == "cpu":
                    found.append(Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, around))
            else:
                within = (*around, event.name)
                waiting += [(child, within) for child in reversed(event.children)]
        found.sort(key=lambda each: each.time_ns)


@contextlib.contextmanager
def _cpu(peak: Peak) -> Iterator[None]:
    allocations: list[Allocation] = []
    try:
        with cpu_allocations(operators=False) as allocations:
            yield
    finally:
        held = 0
        sizes: dict[int, int] = {}
        for each in allocations:
            if each.bytes > 0:
                # A thread that torch does not report released what lay here before.
                held += each.bytes - sizes.get(each.address, 0)
                sizes[each.address] = each.bytes
            else:
                # For memory from before the block torch may report the size of what lay there
                # when it last looked.
                held -= sizes.pop(each.address, 0)
            peak.bytes = max(peak.bytes, held)
            peak.largest = max(peak.largest, each.bytes)


@contextlib.contextmanager
def _cuda(peak: Peak, place: torch.device) -> Iterator[None]:
    index = torch.cuda.current_device() if place.index is None else place.index
    # Autograd's thread keeps its last tensors until the next backward pass: run one.
    with torch.enable_grad():
        torch.zeros((), device=place, requires_grad=True).neg().backward()
    torch.cuda.synchronize(index)
    held = torch.cuda.memory_allocated(index)
    torch.cuda.reset_peak_memory_stats(index)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, context=None, clear_history=True)
    try:
        yield
    finally:
        torch.cuda.synchronize(index)
        peak.bytes = torch.cuda.max_memory_allocated(index) - held
        trace = torch.cuda.memory._snapshot()["device_traces"][index]
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
