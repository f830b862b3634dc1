"""Launch kernels; if one of a call has to be compiled, compile all of them side by side.

`compile_side_by_side` runs a call. Where one of its launches has to compile, the call is rehearsed
first: the same function runs on tensors without memory, and its launches are only noted. Threads
compile what was noted, and each launch waits for its own kernel.

A rehearsal launches nothing, allocates nothing on the device, and reads no number. It ends after
MOST_STEPS. A kernel that a rehearsal does not reach, or a thread cannot compile, is compiled at its
launch, which raises the error if that fails.
"""

import contextlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton.runtime import driver

from lowtide.core.compile_ahead.launchers import load_apart
from lowtide.core.compile_ahead.notes import note, noting
from lowtide.core.compile_ahead.placeholders import ALIGNMENT, WithoutMemory, map_tensors, placeholder_of

Result = TypeVar("Result")

MOST_THREADS = 16
# Steps of a rehearsal, each of which takes the host 0.1 to 0.25 ms. A call in a small workspace
# repeats a few kernels for each chunk of tokens or classes; its first chunks have all of them.
MOST_STEPS = 4096


class Launch(NamedTuple):
    """Hold a kernel, and what it is launched with."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what Triton compiles the kernel for.

        That is the dtype of each pointer, and whether it is a multiple of 16; whether an integer is
        1, a multiple of 16, or needs 64 bits, in tuples too; dtype and box of a tensor descriptor;
        each constant.
        """
        # A kernel's own hash is that of all its source, which takes long to compute.
        return (self.kernel.fn, *self.constants.items(), *map(_kind_of, self.arguments))

    @property
    def descriptors(self) -> int:
        """Return the number of tensor descriptors, which GEMMs have."""
        return sum(hasattr(each, "block_shape") for each in self.arguments)


def _kind_of(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNMENT == 0
    if isinstance(argument, int):
        return argument if argument == 1 else (argument % ALIGNMENT == 0, argument.bit_length() > 31)
    if isinstance(argument, tuple):
        return tuple(map(_kind_of, argument))
    if hasattr(argument, "block_shape"):  # a tensor descriptor, of Triton or Gluon
        return (argument.base.dtype, *argument.block_shape)
    return type(argument)


Rehearsal = Callable[[], list[Launch]]

_rehearsals: ContextVar[list[Rehearsal] | None] = ContextVar("a call's rehearsal", default=None)
_compiled: dict[tuple[Any, ...], Future[None] | None] = {}
"""For each device and kind of launch, the future that compiles it; None if its launch did."""


def compile_side_by_side(
    function: Callable[..., Result], *arguments: Any, rehearsal: Callable[..., Any] | None = None
) -> Result:
    """Return function(*arguments); if a kernel has to be compiled, compile all side by side.

    `rehearsal`, if given, is rehearsed in the function's place; it may also launch what comes after
    the function. What is rehearsed must not depend on numbers in the tensors, nor communicate with
    other processes.
    """
    token = _rehearsals.set([partial(rehearse, rehearsal or function, *arguments)])
    try:
        return function(*arguments)
    finally:
        _rehearsals.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Launch a kernel through Triton, and return it compiled; in a rehearsal note the launch."""
    wanted = Launch(kernel, grid, arguments, constants)
    if note(wanted):
        return None
    device, rehearsals = driver.active.get_current_device(), _rehearsals.get()
    key = device, wanted.kind
    # While a graph is captured, no other thread may call CUDA.
    if key not in _compiled and rehearsals and not torch.cuda.is_current_stream_capturing():
        with contextlib.suppress(Exception):  # the call itself raises its errors
            _compile(device, rehearsals.pop()())
    compiling = _compiled.setdefault(key)
    if compiling is not None:
        compiling.exception()  # waits; where the thread failed, the launch fails too and raises
    return kernel[grid](*arguments, **constants)


class TooManySteps(Exception):
    """Signal that a rehearsal was ended early; `steps` has its steps until then."""

    def __init__(self, steps: list[Any]) -> None:
        super().__init__(f"a rehearsal of more than {MOST_STEPS} steps")
        self.steps = steps


class _Steps(list[Any]):
    def append(self, step: Any) -> None:
        if len(self) == MOST_STEPS:
            raise TooManySteps(self)
        super().append(step)


def rehearse(function: Callable[..., Any], *arguments: Any) -> list[Launch]:
    """Return what function(*arguments) launches, within its first MOST_STEPS steps."""
    try:
        steps, _ = rehearse_steps(function, map_tensors(placeholder_of, arguments))
    except TooManySteps as ended:
        steps = ended.steps
    return [each for each in steps if isinstance(each, Launch)]


def rehearse_steps(function: Callable[..., Result], arguments: Sequence[Any]) -> tuple[list[Any], Result]:
    """Return the steps of function(*arguments), in order, and what it returns.

    These are its launches, the operations that it asks of torch, and its collectives. Its tensors
    are placeholders. A call of more than MOST_STEPS steps raises TooManySteps.
    """
    steps = _Steps()
    with noting(steps), WithoutMemory(steps.append):
        return steps, function(*arguments)


def _compile(device: int, launches: list[Launch]) -> None:
    """Begin to compile what is not compiled yet."""
    kinds = {(device, each.kind): each for each in launches}
    new = [(key, each) for key, each in kinds.items() if key not in _compiled]
    if not new:
        return
    for _, (kernel, *_) in new:
        # Triton makes both at the first use. Keys of its cache on disk depend on the order in which
        # they are made: if threads made them, the next process would not find its kernels.
        _ = kernel.cache_key, kernel.device_caches[device]
    # The first compilation hashes the whole compiler for all; else each thread would do so.
    _compile_one(new[0][1])
    load_apart()
    new.sort(key=lambda item: item[1].descriptors, reverse=True)  # GEMMs take longest
    pool = ThreadPoolExecutor(min(MOST_THREADS, len(new), os.cpu_count() or 1))
    for key, each in new:
        _compiled[key] = pool.submit(_prepare, device, each)
    pool.shutdown(wait=False)


def _prepare(device: int, launch: Launch) -> None:
    """Compile a kernel in a thread, build the C function that launches it, and load both."""
    driver.active.set_current_device(device)
    _compile_one(launch).run  # noqa: B018


def _compile_one(launch: Launch) -> Any:
    return launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.constants)
