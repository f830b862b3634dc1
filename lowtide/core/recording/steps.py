"""Define the steps of a recording: allocations, launches, operations of torch, collectives."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from lowtide.core.compile_ahead.launches import launch
from lowtide.core.kernels.launch import constants_in_order, is_launched_by_handle

Memories = list[Any]
"""The tensors of a run, given and made, and the collectives that were begun.

None for those not made yet, or freed already.
"""


class Unlike(RuntimeError):
    """Signal that an operation returned another layout than in the rehearsal."""


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

    def tensor(self, memories: Memories) -> Tensor:
        memory: Tensor = memories[self.memory]
        if self.whole:
            return memory
        shape, strides, dtype = self.layout
        if memory.dtype == dtype:
            return memory.as_strided(shape, strides, memory.storage_offset() + self.offset // dtype.itemsize)
        begins = memory.storage_offset() * memory.element_size() + self.offset
        made = torch.empty(0, dtype=dtype, device=memory.device)
        return made.set_(memory.untyped_storage(), begins // dtype.itemsize, shape, strides)  # type: ignore[arg-type]


class Box(NamedTuple):
    """Hold a tensor descriptor whose tensor is a part of a memory."""

    part: Part
    descriptor: Any
    """The descriptor, without its tensor."""

    def described(self, memories: Memories) -> Any:
        made = copy.copy(self.descriptor)
        made.base = self.part.tensor(memories)
        return made


@dataclass(slots=True)
class AllocationStep:
    """Allocate memory."""

    memory: int
    layout: MemoryLayout
    device: torch.device

    def run(self, memories: Memories, stream: int | None) -> None:
        shape, strides, dtype = self.layout
        memories[self.memory] = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)

    def memories(self) -> Iterator[int]:
        yield self.memory


@dataclass(slots=True)
class Question:
    """Run an operation of torch."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    results: tuple[Part, ...]
    """The new tensors; none if the operation writes to its arguments."""

    def run(self, memories: Memories, stream: int | None) -> None:
        found = self.function(*_filled(self.arguments, memories), **_filled(self.options, memories))
        if not self.results:
            return
        for part, own in zip(self.results, (found,) if isinstance(found, Tensor) else found):
            if layout_of(own) != part.layout:
                raise Unlike(f"{self.function} returned {layout_of(own)}, expected {part.layout}")
            memories[part.memory] = own

    def memories(self) -> Iterator[int]:
        yield from _memories_in((self.arguments, self.options, self.results))


@dataclass(slots=True)
class BeginStep:
    """Begin a collective."""

    work: int
    """The place among the memories of what is waited for."""
    begin: Callable[..., Any]
    tensors: tuple[Part, ...]

    def run(self, memories: Memories, stream: int | None) -> None:
        memories[self.work] = self.begin(*[each.tensor(memories) for each in self.tensors])

    def memories(self) -> Iterator[int]:
        yield self.work
        yield from (each.memory for each in self.tensors)


class EndStep(BeginStep):
    """Wait for a collective that was begun, whose tensors live until then."""

    def run(self, memories: Memories, stream: int | None) -> None:
        memories[self.work].wait()


@dataclass(slots=True)
class Start:
    """Launch a kernel: the first time through Triton, then by its handle."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    compiled: Any = None
    values: list[Any] = field(default_factory=list)
    """The values that the handle takes; each launch fills in the tensors' addresses."""
    tensors: list[tuple[int, int, int]] = field(default_factory=list)
    """For each tensor: its place among the values, its memory and its offset."""
    others: list[tuple[int, Any]] = field(default_factory=list)
    """Places of values that are tuples of tensors, or tensor descriptors."""

    def run(self, memories: Memories, stream: int | None) -> None:
        compiled = self.compiled
        if compiled is None or stream is None:
            self._by_triton(memories)
            return
        values = self.values.copy()
        for place, memory, offset in self.tensors:
            values[place] = memories[memory].data_ptr() + offset
        for place, parts in self.others:
            values[place] = _addresses(parts, memories)
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *values
        )

    def memories(self) -> Iterator[int]:
        yield from _memories_in(self.arguments)

    def _by_triton(self, memories: Memories) -> None:
        arguments = _filled(self.arguments, memories)
        if not isinstance(self.kernel, JITFunction):  # the interpreter's
            self.kernel[self.grid](*arguments, **self.constants)
            return
        compiled = launch(self.kernel, self.grid, arguments, self.constants)
        if self.compiled is not None or not is_launched_by_handle(compiled):
            return
        places = list(enumerate(self.arguments))
        self.values = [
            *self.arguments,
            *constants_in_order(self.kernel, len(self.arguments), self.constants),
        ]
        self.tensors = [(place, each.memory, each.offset) for place, each in places if type(each) is Part]
        self.others = [(place, each) for place, each in places if type(each) in (tuple, Box)]
        self.compiled = compiled  # last, since other threads run the same steps


def layout_of(tensor: Tensor) -> MemoryLayout:
    return MemoryLayout(tensor.shape, tensor.stride(), tensor.dtype)


def _filled(value: Any, memories: Memories) -> Any:
    """Return arguments with the tensor of each Part."""
    kind = type(value)
    if kind is Part:
        return value.tensor(memories)
    if kind is Box:
        return value.described(memories)
    if kind is tuple or kind is list:
        return kind([_filled(each, memories) for each in value])
    if kind is dict:
        return {name: _filled(each, memories) for name, each in value.items()}
    return value


def _addresses(parts: Any, memories: Memories) -> Any:
    """Return a tuple with the address of each Part, or a descriptor."""
    kind = type(parts)
    if kind is Part:
        return memories[parts.memory].data_ptr() + parts.offset
    if kind is Box:
        return parts.described(memories)
    return tuple([_addresses(each, memories) for each in parts]) if kind is tuple else parts


def _memories_in(value: Any) -> Iterator[int]:
    if type(value) is Part:
        yield value.memory
    elif type(value) is Box:
        yield value.part.memory
    elif type(value) in (tuple, list, dict):
        for each in value.values() if type(value) is dict else value:
            yield from _memories_in(each)
