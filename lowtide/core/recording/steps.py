"""Define the steps of a recording: allocations, launches, operations of torch, collectives.

An operation, and the end of a collective, are the notes of the rehearsal, with a Part in the place
of each tensor. The results of an operation are the new tensors; it has none if it writes to its
arguments.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from lowtide.core.collectives import End
from lowtide.core.compile_ahead.launches import launch
from lowtide.core.compile_ahead.placeholders import Operation
from lowtide.core.kernels.launch import constants_in_order, is_launched_by_handle


class MemoryLayout(NamedTuple):
    """Hold how a tensor lies in its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def permutes(self, other: "MemoryLayout") -> bool:
        """Return True if the other layout has the same dimensions in some order."""
        own, others = (sorted(zip(each.shape, each.strides)) for each in (self, other))
        return own == others and self.dtype == other.dtype


class Part(NamedTuple):
    """Hold which part of which memory a tensor is."""

    memory: int
    offset: int
    """The offset in bytes from where the memory's tensor begins."""
    layout: MemoryLayout
    whole: bool
    """True if the part is the memory's tensor itself."""


class DescriptorPart(NamedTuple):
    """Hold a tensor descriptor whose tensor is a part of a memory."""

    part: Part
    descriptor: Any
    """The descriptor, without its tensor."""

    def described(self, base: Tensor) -> Any:
        """Return the descriptor of a tensor; copy.copy takes five times as long."""
        made = object.__new__(type(self.descriptor))
        made.__dict__.update(self.descriptor.__dict__)
        made.base = base
        return made


class AllocationStep(NamedTuple):
    """Allocate memory."""

    memory: int
    layout: MemoryLayout
    device: torch.device


class BeginStep(NamedTuple):
    """Begin a collective."""

    work: int
    """The place among the memories of what is waited for."""
    begin: Callable[..., Any]
    tensors: tuple[Part, ...]


class LaunchStep:
    """Launch a kernel: the first time through Triton, then by its handle."""

    def __init__(self, kernel: Any, grid: tuple[int, int, int], arguments: Any, constants: Any) -> None:
        self.kernel, self.grid, self.arguments, self.constants = kernel, grid, arguments, constants
        self.compiled: Any = None
        """The compiled kernel, if it was launched and has a handle."""

    def by_triton(self, *arguments: Any) -> None:
        """Launch the kernel with these tensors."""
        if not isinstance(self.kernel, JITFunction):  # the interpreter's
            self.kernel[self.grid](*arguments, **self.constants)
            return
        compiled = launch(self.kernel, self.grid, arguments, self.constants)
        if is_launched_by_handle(compiled):
            self.compiled = compiled

    @property
    def values(self) -> tuple[Any, ...]:
        """Return what the handle takes, with a part in the place of each tensor and descriptor."""
        constants = constants_in_order(self.kernel, len(self.arguments), self.constants)
        return *self.arguments, *constants


Step = AllocationStep | Operation | LaunchStep | BeginStep | End


def layout_of(tensor: Tensor) -> MemoryLayout:
    return MemoryLayout(tensor.shape, tensor.stride(), tensor.dtype)


def memories_of(step: Step) -> Iterator[int]:
    """Yield the memories that a step reads or writes."""
    if isinstance(step, AllocationStep):
        yield step.memory
    elif isinstance(step, Operation):
        yield from _memories_in(tuple(step))
    elif isinstance(step, LaunchStep):
        yield from _memories_in(step.arguments)
    else:
        begun = step.begun if isinstance(step, End) else step  # its tensors live until it ends
        yield begun.work
        yield from _memories_in(begun.tensors)


def _memories_in(value: Any) -> Iterator[int]:
    if type(value) is Part:
        yield value.memory
    elif type(value) is DescriptorPart:
        yield value.part.memory
    elif type(value) in (tuple, list, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _memories_in(each)
