"""Record what a function does with its tensors, and repeat that for tensors that are alike.

A function that decides by shapes, strides and dtypes decides the same in each call of a training
run, and deciding takes the host longer than launching. So the function is rehearsed on tensors
without memory (core/compile_ahead). Its allocations, launches, operations of torch and collectives
become a list of steps, which calls that are alike run. Memory is freed after the last step that
reads it.

A function that is recorded changes no tensor that it is given. It depends on nothing but shapes,
strides, dtypes, devices and alignment, and on the `likeness` that its caller passes.
"""

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

from lowtide.core import torch_private
from lowtide.core.collectives import Begin, End
from lowtide.core.compile_ahead.launches import Launch, rehearse_steps
from lowtide.core.compile_ahead.placeholders import (
    UNSAFE_VIEW,
    WIDEST,
    Operation,
    Placeholder,
    placeholder_of,
)
from lowtide.core.kernels.launch import watched
from lowtide.core.recording.script import Run, Unlike, written
from lowtide.core.recording.steps import (
    AllocationStep,
    BeginStep,
    DescriptorPart,
    LaunchStep,
    MemoryLayout,
    Part,
    Step,
    layout_of,
    memories_of,
)

# The most recordings of a function. At this number it drops all of them, and begins again.
MOST = 64
# Which call of a likeness is recorded. A recording takes the host as long as dozens of calls save
# (decision 0070). So sizes that come a few times, as with sequences of any length, would never pay
# for one.
RECORDED_CALL = 8
# The same for what a model calls in each of its layers. A length that comes in one step alone
# should not be recorded in that step.
RECORDED_CALL_OF_LAYERS = 64
ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

Note = Launch | Operation | Begin | End
Results = Sequence[Tensor | None]


class Recordings:
    """Hold a recording for each likeness of the calls of functions of tensors."""

    def __init__(self, *, in_layers: bool = False) -> None:
        self.in_layers = in_layers
        self.known: dict[Hashable, Recording | None] = {}
        self.calls: dict[Hashable, int] = {}
        """Counts the calls of each likeness until it is recorded."""

    def call(self, function: Callable[..., Results], likeness: Hashable, tensors: Results) -> Results:
        """Return function(*tensors), computed on the current device, where the tensors are.

        `likeness` must differ for calls that differ in the function or in anything that it depends
        on, except where tensors begin. This torch must have `torch_private.below_autograd`.
        """
        likeness = likeness, _alignment(tensors)
        if likeness not in self.known and self._comes_often(likeness):
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[likeness] = record(function, tensors)
        recording = self.known.get(likeness)
        if recording is not None:
            try:
                return recording.run(tensors)
            except Unlike:
                if recording.speaks:  # to run the function would repeat collectives
                    raise
                self.known[likeness] = None
        with torch_private.below_autograd():
            return function(*tensors)

    def _comes_often(self, likeness: Hashable) -> bool:
        """Count a call, and return True if it is the one to be recorded."""
        if len(self.calls) >= MOST and likeness not in self.calls:
            self.calls.clear()
        count = self.calls.get(likeness, 0) + 1
        self.calls[likeness] = count
        if count < (RECORDED_CALL_OF_LAYERS if self.in_layers else RECORDED_CALL):
            return False
        self.calls.pop(likeness, None)  # another thread may have done so
        return True


class RecordedFunction(Recordings):
    """Hold a function of tensors, and a recording for each likeness of its calls."""

    def __init__(self, function: Callable[..., Results], *, in_layers: bool = False) -> None:
        super().__init__(in_layers=in_layers)
        self.function = function

    def __call__(self, likeness: Hashable, *tensors: Tensor | None) -> Results:
        """Return function(*tensors); see `call`."""
        return self.call(self.function, likeness, tensors)


def _alignment(tensors: Sequence[Tensor | None]) -> Hashable:
    """Return where tensors begin, as far as launches depend on it; None if all are aligned."""
    begins = 0
    for each in tensors:
        if each is not None:
            begins |= each.data_ptr()
    if begins % WIDEST == 0:
        return None
    return tuple([0 if each is None else each.data_ptr() % WIDEST for each in tensors])


@dataclass
class Recording:
    """Hold the steps of a call, each with the memories that no later step reads."""

    steps: list[tuple[Step, tuple[int, ...]]]
    given: int
    """Counts the given tensors, which are the first memories."""
    dtypes: list[torch.dtype | None]
    """The dtype of each memory; None for what is no tensor."""
    results: list[Part | None]
    through_triton: Run | None = field(default=None, init=False)
    by_handle: Run | None = field(default=None, init=False)
    """Runs the steps; None until all kernels were launched once, or if one has no handle."""

    @property
    def speaks(self) -> bool:
        """Return True if there are collectives."""
        return any(isinstance(step, BeginStep) for step, _ in self.steps)

    def run(self, tensors: Results) -> list[Tensor | None]:
        with torch_private.below_autograd():
            if self.by_handle is not None and not watched():
                active: Any = driver.active
                return self.by_handle(tensors, active.get_current_stream(active.get_current_device()))
            if self.through_triton is None:
                self.through_triton = self._written(by_handle=False)
            found = self.through_triton(tensors, None)
        starts = [step for step, _ in self.steps if isinstance(step, LaunchStep)]
        if self.by_handle is None and starts and all(each.compiled is not None for each in starts):
            self.by_handle = self._written(by_handle=True)
        return found

    def _written(self, *, by_handle: bool) -> Run:
        return written(self.steps, self.given, self.dtypes, self.results, by_handle=by_handle)


def record(function: Callable[..., Results], tensors: Results) -> Recording | None:
    """Return a recording of function(*tensors), or None if it cannot be recorded."""
    with contextlib.suppress(Exception):  # the call itself raises its errors
        given = [None if each is None else placeholder_of(each) for each in tensors]
        notes, results = rehearse_steps(function, given)
        return _Recorder(given, notes, results).recording()
    return None


class _Recorder:
    """Make steps of what a rehearsal noted."""

    def __init__(self, given: Sequence[Tensor | None], notes: Sequence[Note], results: Results) -> None:
        self.given, self.notes, self.results = given, notes, results
        self.places: dict[int, int] = {}
        """The number of each memory of the rehearsal."""
        self.begins: list[int] = []
        """Holds where each memory's first tensor begins, in bytes; `layouts` has its layout."""
        self.layouts: list[MemoryLayout | None] = []
        self.begun: dict[int, BeginStep] = {}
        """The step of each collective that was begun."""

    def recording(self) -> Recording:
        for each in self.given:
            self._add(each)
        for note in self.notes:
            for each in _new_tensors(note):
                if _memory_of(each) not in self.places:
                    self._add(each)
        self._make_as_returned()
        results = [None if each is None else self._part(each) for each in self.results]
        steps = [step for note in self.notes if (step := self._step(note)) is not None]
        dtypes = [None if each is None else each.dtype for each in self.layouts]
        return Recording(self._with_last_reads(steps, results), len(self.given), dtypes, results)

    def _add(self, tensor: Tensor | None) -> None:
        if tensor is not None:
            self.places[_memory_of(tensor)] = len(self.layouts)
        self.layouts.append(None if tensor is None else layout_of(tensor))
        self.begins.append(0 if tensor is None else _first_byte(tensor))

    def _make_as_returned(self) -> None:
        """Allocate memory in the layout of the result, if a result is a view of all of it."""
        allocated = {
            self.places[_memory_of(note.results)]
            for note in self.notes
            if isinstance(note, Operation) and note.function in ALLOCATIONS
        }
        for each in self.results:
            if each is None:
                continue
            part = self._part(each)
            made, found = self.layouts[part.memory], part.layout
            if part.memory in allocated and made is not None and not part.offset and found.permutes(made):
                self.layouts[part.memory] = found

    def _part(self, tensor: Tensor) -> Part:
        """Return which part of a known memory a tensor is; raise a KeyError for another memory."""
        place, layout = self.places[_memory_of(tensor)], layout_of(tensor)
        offset = _first_byte(tensor) - self.begins[place]
        return Part(place, offset, layout, not offset and layout == self.layouts[place])

    def _step(self, note: Note) -> Step | None:
        """Return the step for a note; None for a view."""
        if isinstance(note, Begin):
            self._add(None)
            begun = BeginStep(len(self.layouts) - 1, note.begin, tuple(map(self._part, note.tensors)))
            self.begun[id(note)] = begun
            return begun
        if isinstance(note, End):
            return End(self.begun[id(note.begun)])
        if isinstance(note, Launch):
            width, height, depth = (*note.grid, 1, 1)[:3]
            return LaunchStep(
                note.kernel, (width, height, depth), self._described(note.arguments), note.constants
            )
        arguments, options = self._described(note.arguments), self._described(note.options)
        if _writes(note):
            return Operation(note.function, arguments, options, ())
        returned = list(_new_tensors(note))
        if not returned:
            return None
        parts = tuple(map(self._part, returned))
        if note.function in ALLOCATIONS:
            made = self.layouts[parts[0].memory]
            assert made is not None
            return AllocationStep(parts[0].memory, made, returned[0].device)
        return Operation(note.function, arguments, options, parts)

    def _described(self, value: Any) -> Any:
        """Return arguments with a Part in the place of each tensor."""
        if isinstance(value, Placeholder):
            return self._part(value)
        if isinstance(value, dict):
            return {name: self._described(each) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            items = map(self._described, value)
            return list(items) if isinstance(value, list) else tuple(items)
        if hasattr(value, "block_shape"):  # a tensor descriptor, of Triton or Gluon
            own = copy.copy(value)
            own.base = None
            return DescriptorPart(self._part(value.base), own)
        if value is not None and not isinstance(value, CONSTANTS):
            raise TypeError(f"a recording with an argument of {type(value)}")
        return value

    def _with_last_reads(
        self, steps: Sequence[Step], results: Sequence[Part | None]
    ) -> list[tuple[Step, tuple[int, ...]]]:
        """Return the steps with the memories that each is the last to read."""
        last = {memory: place for place, step in enumerate(steps) for memory in memories_of(step)}
        kept = {*range(len(self.given)), *(each.memory for each in results if each is not None)}
        ends: list[list[int]] = [[] for _ in steps]
        for memory, place in last.items():
            if memory not in kept:
                ends[place].append(memory)
        return [(step, tuple(read)) for step, read in zip(steps, ends)]


def _new_tensors(note: Note) -> Iterator[Tensor]:
    """Yield the tensors that an operation returns in new memory."""
    if not isinstance(note, Operation) or note.function is UNSAFE_VIEW:
        return
    if not any(each.alias_info for each in note.function._schema.returns):
        results = note.results if isinstance(note.results, (list, tuple)) else (note.results,)
        yield from (each for each in results if isinstance(each, Tensor))  # a result may also be a number


def _writes(note: Operation) -> bool:
    arguments = note.function._schema.arguments
    return any(each.alias_info is not None and each.alias_info.is_write for each in arguments)


def _memory_of(tensor: Any) -> int:
    return int(tensor.meta.untyped_storage()._cdata)


def _first_byte(tensor: Any) -> int:
    return int(tensor.storage_offset() * tensor.element_size())
