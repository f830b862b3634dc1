"""Write the steps of a recording as one Python function, which the host runs without deciding.

To look at each step anew, and at each of its arguments, took the host as long as to run the step.
In the function a memory is a local variable, a view is made once, where it is first used, and a
tensor that a kernel is given by its handle is an address. Each is freed after its last use.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.recording.steps import (
    AllocationStep,
    BeginStep,
    Box,
    EndStep,
    MemoryLayout,
    Part,
    Question,
    Start,
    Step,
    layout_of,
)

Run = Callable[[Sequence[Tensor | None], int | None], list[Tensor | None]]
"""Returns the results, from the given tensors and the stream of launches by handle."""

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
    for step, read in steps:
        script.add(step)
        script.free(read)
    returned = ", ".join(map(script.tensor, results))
    names = "".join(f"m{each}, " for each in range(given))
    first = [f"{names} = given"] if given else []
    lines = ["def run(given, stream):", *first, *script.lines, f"return [{returned}]"]
    exec("\n    ".join(lines), script.known)
    run: Run = script.known["run"]
    return run


class _Script:
    """Hold the lines of a function, and the objects that they name."""

    def __init__(self, dtypes: Sequence[torch.dtype | None], by_handle: bool) -> None:
        self.dtypes, self.by_handle = dtypes, by_handle
        self.lines: list[str] = []
        self.known: dict[str, Any] = {
            "empty_strided": torch.empty_strided,
            "of_other_dtype": _of_other_dtype,
            "compare": _compare,
        }
        """Each object by its name in the lines."""
        self.variables: dict[int, dict[Any, str]] = {}
        """For each memory the variables of its views and of its address."""

    def add(self, step: Step) -> None:
        if isinstance(step, AllocationStep):
            shape, strides, dtype = step.layout
            options = f"dtype={self.value(dtype)}, device={self.value(step.device)}"
            self.lines.append(f"m{step.memory} = empty_strided({(*shape,)}, {(*strides,)}, {options})")
        elif isinstance(step, Start):
            self.add_launch(step)
        elif isinstance(step, BeginStep):
            call = f"{self.value(step.begin)}({', '.join(map(self.tensor, step.tensors))})"
            self.lines.append(f"m{step.work} = {call}")
        elif isinstance(step, EndStep):
            self.lines.append(f"m{step.work}.wait()")
        else:
            self.add_question(step)

    def add_launch(self, step: Start) -> None:
        if not self.by_handle:
            arguments = map(self.value, step.arguments)
            self.lines.append(f"{self.value(step.by_triton)}({', '.join(arguments)})")
            return
        kernel = step.compiled
        of_kernel = *step.grid, "stream", *map(self.value, (kernel.function, kernel.packed_metadata))
        call = *of_kernel, *["None"] * 3, *[self.value(each, address=True) for each in step.values]
        self.lines.append(f"{self.value(kernel.run)}({', '.join(map(str, call))})")

    def add_question(self, step: Question) -> None:
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
        freed = [each for memory in memories for each in (f"m{memory}", *self._variables(memory).values())]
        if freed:
            self.lines.append(f"{' = '.join(freed)} = None")

    def value(self, value: Any, *, address: bool = False) -> str:
        """Return the expression for a step's argument; for a tensor, for its address if asked."""
        kind = type(value)
        if kind is Part:
            return self.address(value) if address else self.tensor(value)
        if kind is Box:
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
        if self.dtypes[part.memory] is not dtype:
            return f"of_other_dtype({memory}, {self.value(dtype)}, {part.offset}, {where})"
        return f"{memory}.as_strided({where}, {memory}.storage_offset() + {part.offset // dtype.itemsize})"


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
