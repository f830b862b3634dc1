"""Write the steps of a recording as one Python function, which the host runs without deciding.

To look at each step anew, and at each of its arguments, took the host as long as to run the step.
In the function a memory is a local variable, a view is made once, where it is first used, and a
tensor that a kernel is given by its handle is an address. Each is freed after its last use. Small
memories that only such launches use are parts of one allocation, where one takes the place of
another that is read no more.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.collectives import End
from lowtide.core.compile_ahead.placeholders import Operation
from lowtide.core.kernels.handle import TensorMaps, handle_of
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

Run = Callable[[Sequence[Tensor | None], int | None], list[Tensor | None]]
"""Returns the results, from the given tensors and the stream of launches by handle."""

# The most bytes of a memory that shares an allocation; and how far apart such memories begin, which
# is as far as torch's own allocations do.
SMALL, APART = 1 << 16, 512
PLAIN = (bool, int, str, type(None))  # types of constants that are written as they are


class Unlike(RuntimeError):
    """Signal that an operation returned another layout than in the rehearsal."""


def written(
    steps: Sequence[tuple[Step, Sequence[int]]],
    given: int,
    dtypes: Sequence[torch.dtype | None],
    results: Sequence[Part | None],
    *,
    by_handle: bool,
) -> Run:
    """Return a function that runs the steps, each with the memories that no later step reads.

    The first memories are the given tensors. Launches go through Triton, and each layout that an
    operation returns is compared with that of the rehearsal; or, once this has been done, launches
    go by the kernels' handles.
    """
    script = _Script(dtypes, by_handle)
    if by_handle:
        script.allocate_together(steps, results)
    for step, read in steps:
        script.add(step)
        script.free(read)
    returned = ", ".join(map(script.tensor, results))
    names = "".join(f"m{each}, " for each in range(given))
    first = [f"{names} = given"] if given else []
    lines = ["def run(given, stream):", *first, *script.lines, f"return [{returned}]"]
    exec(compile("\n    ".join(lines), "<recording>", "exec"), script.known)
    run: Run = script.known["run"]
    return run


class _Script:
    """Hold the lines of a function, and the objects that they name."""

    def __init__(self, dtypes: Sequence[torch.dtype | None], by_handle: bool) -> None:
        self.dtypes, self.by_handle = dtypes, by_handle
        self.lines: list[str] = []
        self.known: dict[str, Any] = {
            "empty_strided": torch.empty_strided,
            "empty_on_cuda": torch_private.empty_on_cuda,
            "view_of": torch_private.view_of,
            "of_other_dtype": _of_other_dtype,
            "compare": _compare,
        }
        """Each object by its name in the lines."""
        self.variables: dict[int, dict[Any, str]] = {}
        """For each memory the variables of its views and, by None, its address."""
        self.allocated: dict[int, MemoryLayout] = {}
        self.together: set[int] = set()
        """The memories that are parts of one allocation."""

    def allocate_together(
        self, steps: Sequence[tuple[Step, Sequence[int]]], results: Sequence[Part | None]
    ) -> None:
        """Let small memories, of which launches use the addresses, be parts of one."""
        small = _only_launched([step for step, _ in steps], results)
        small = [each for each in small if each.device == small[0].device and _bytes(each) <= SMALL]
        if len(small) < 2:
            return
        begins = _places(steps, {each.memory: -(-_bytes(each) // APART) * APART for each in small})
        for memory, (begin, _) in begins.items():
            self._variables(memory)[None] = f"small + {begin}"
            self.together.add(memory)
        size = max(end for _, end in begins.values())
        self.allocate("together", MemoryLayout((size,), (1,), torch.uint8), small[0].device)
        self.lines.append("small = together.data_ptr()")

    def add(self, step: Step) -> None:
        if isinstance(step, AllocationStep):
            if step.memory in self.together:
                return
            self.allocated[step.memory] = step.layout
            self.allocate(f"m{step.memory}", step.layout, step.device)
        elif isinstance(step, LaunchStep):
            self.add_launch(step)
        elif isinstance(step, BeginStep):
            call = f"{self.value(step.begin)}({', '.join(map(self.tensor, step.tensors))})"
            self.lines.append(f"m{step.work} = {call}")
        elif isinstance(step, End):
            self.lines.append(f"m{step.begun.work}.wait()")
        else:
            self.add_operation(step)

    def allocate(self, name: str, layout: MemoryLayout, device: torch.device) -> None:
        """Allocate memory; a recording runs on the current device, where its tensors are."""
        shape, strides, dtype = layout
        which = f"{(*shape,)}, {(*strides,)}"
        if device.type == "cuda" and torch_private.empty_on_cuda is not None:
            call = f"empty_on_cuda({which}, {self.value(dtype)})"
        else:
            call = f"empty_strided({which}, dtype={self.value(dtype)}, device={self.value(device)})"
        self.lines.append(f"{name} = {call}")

    def add_launch(self, step: LaunchStep) -> None:
        if not self.by_handle:
            arguments = map(self.value, step.arguments)
            self.lines.append(f"{self.value(step.by_triton)}({', '.join(arguments)})")
            return
        handle = handle_of(step.compiled)
        metadata = None if handle.map_metadata is None else iter(handle.map_metadata)
        call = [*map(str, step.grid), "stream", *map(self.value, handle.before)]
        for each in step.values:
            if metadata is not None and type(each) is DescriptorPart:
                maps = TensorMaps(each.descriptor, next(metadata))
                call.append(f"*{self.value(maps)}[{self.address(each.part)}]")
            else:
                call.append(self.value(each, address=True))
        self.lines.append(f"{self.value(handle.launch)}({', '.join(call)})")

    def add_operation(self, step: Operation) -> None:
        function = getattr(step.function, "_op", step.function)  # the call from Python, or from C++
        options = [f"{name}={self.value(each)}" for name, each in step.options.items()]
        call = f"{self.value(function)}({', '.join([*map(self.value, step.arguments), *options])})"
        made = [f"m{part.memory}" for part in step.results]
        if made:
            several = [str(each.type) for each in step.function._schema.returns] != ["Tensor"]
            call = f"{', '.join(made)}{', *_' * several} = {call}"
        self.lines.append(call)
        if not self.by_handle:
            for name, part in zip(made, step.results):
                self.lines.append(f"compare({name}, {self.value(part.layout)}, {self.value(step.function)})")

    def free(self, memories: Sequence[int]) -> None:
        freed = []
        for memory in memories:
            views = [name for part, name in self._variables(memory).items() if part is not None]
            freed += [f"m{memory}"] * (memory not in self.together) + views
        if freed:
            self.lines.append(f"{' = '.join(freed)} = None")

    def value(self, value: Any, *, address: bool = False) -> str:
        """Return the expression for a step's argument; for a tensor, for its address if asked."""
        kind = type(value)
        if kind is Part:
            return self.address(value) if address else self.tensor(value)
        if kind is DescriptorPart:
            return f"{self.value(value.described)}({self.tensor(value.part)})"
        if kind in (tuple, list):
            items = ", ".join(self.value(each, address=address) for each in value)
            return f"({items}{',' * bool(items)})" if kind is tuple else f"[{items}]"
        if kind in PLAIN:
            return repr(value)
        name = f"c{len(self.known)}"
        self.known[name] = value
        return name

    def tensor(self, part: Part | None) -> str:
        """Return the expression for a tensor; a view is made before its first use."""
        if part is None:
            return "None"
        if part.whole:
            return f"m{part.memory}"
        views = self._variables(part.memory)
        if part not in views:
            views[part] = f"v{part.memory}_{len(views)}"
            self.lines.append(f"{views[part]} = {self._view(part)}")
        return views[part]

    def address(self, part: Part) -> str:
        variables = self._variables(part.memory)
        if None not in variables:
            variables[None] = f"a{part.memory}"
            self.lines.append(f"a{part.memory} = m{part.memory}.data_ptr()")
        return f"{variables[None]} + {part.offset}" if part.offset else variables[None]

    def _variables(self, memory: int) -> dict[Any, str]:
        return self.variables.setdefault(memory, {})

    def _view(self, part: Part) -> str:
        memory, (shape, strides, dtype) = f"m{part.memory}", part.layout
        where = f"{(*shape,)}, {(*strides,)}"
        first, made = part.offset // dtype.itemsize, self.allocated.get(part.memory)
        if self.dtypes[part.memory] is dtype:
            return f"view_of({memory}, {where}, {first})"
        if made is not None and _is_viewed_as(made, dtype):
            return f"view_of({memory}.view({self.value(dtype)}), {where}, {first})"
        return f"of_other_dtype({memory}, {self.value(dtype)}, {part.offset}, {where})"


def _only_launched(steps: Sequence[Step], results: Sequence[Part | None]) -> list[AllocationStep]:
    """Return the allocations of memories that launches use by their addresses, and nothing else."""
    others = {each.memory for each in results if each is not None}
    for step in steps:
        if isinstance(step, LaunchStep):
            others.update(_boxed(step.arguments))
        elif not isinstance(step, AllocationStep):
            others.update(memories_of(step))
    return [each for each in steps if isinstance(each, AllocationStep) and each.memory not in others]


def _places(steps: Sequence[tuple[Step, Sequence[int]]], sizes: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Return where memories of these sizes begin and end, so that none overlaps another in use."""
    places: dict[int, tuple[int, int]] = {}
    used: set[int] = set()
    for step, read in steps:
        if isinstance(step, AllocationStep) and step.memory in sizes:
            begin, size = 0, sizes[step.memory]
            for first, end in sorted(places[each] for each in used):
                if begin + size <= first:
                    break
                begin = max(begin, end)
            places[step.memory] = begin, begin + size
            used.add(step.memory)
        used.difference_update(read)
    return places


def _boxed(value: Any) -> Iterator[int]:
    """Yield the memories of tensor descriptors, which hold tensors."""
    if isinstance(value, DescriptorPart):
        yield value.part.memory
    elif type(value) is tuple:
        for each in value:
            yield from _boxed(each)


def _bytes(step: AllocationStep) -> int:
    shape, strides, dtype = step.layout
    reach = sum((size - 1) * stride for size, stride in zip(shape, strides))
    return max(0, reach + 1) * dtype.itemsize if 0 not in shape else 0


def _is_viewed_as(layout: MemoryLayout, dtype: torch.dtype) -> bool:
    """Return True if Tensor.view takes a new tensor of this layout for one of the dtype."""
    wider = max(1, dtype.itemsize // layout.dtype.itemsize)
    if not layout.shape or layout.strides[-1] != 1:
        return False
    return not any(each % wider for each in (layout.shape[-1], *layout.strides[:-1]))


def _of_other_dtype(
    memory: Tensor, dtype: torch.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Tensor:
    """Return a view of the memory of a tensor, `offset` bytes from where the tensor begins."""
    begins = memory.storage_offset() * memory.element_size() + offset
    made = torch.empty(0, dtype=dtype, device=memory.device)
    return made.set_(memory.untyped_storage(), begins // dtype.itemsize, shape, strides)  # type: ignore[arg-type]


def _compare(found: Tensor, expected: MemoryLayout, function: Any) -> None:
    if layout_of(found) != expected:
        raise Unlike(f"{function} returned {layout_of(found)}, expected {expected}")
