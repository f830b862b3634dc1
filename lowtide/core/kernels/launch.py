"""Launch a Triton kernel again without repeating what its first launch found out.

For each launch Triton describes every argument, and looks the compiled kernel up by all of the
descriptions. That takes the host 20 to 60 microseconds, and a small call waits for it.
`remember_launches` looks a kernel up by fewer facts, and passes addresses in place of tensors.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import triton
from torch import Tensor, nn
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from lowtide.core.compile_ahead.launches import Launch, launch
from lowtide.core.compile_ahead.notes import in_rehearsal, note
from lowtide.core.compile_ahead.placeholders import ALIGNMENT
from lowtide.core.kernels.handle import Handle, handle_of

# The most launches that a kernel remembers. At this number it forgets all, and begins again.
MOST_LAUNCHES = 512
INTEGERS = frozenset({int})


def remember_launches(kernel: Any) -> Any:
    """Return an object that launches the kernel, and remembers launches of a compiled one.

    The object is launched like the kernel, by `kernel[grid](*arguments, **constants)`: what varies
    is passed by position, constants and options by keyword.
    """
    return (RememberedKernel if isinstance(kernel, JITFunction) else InterpretedKernel)(kernel)


class InterpretedKernel:
    """Hold a kernel that Triton's interpreter runs."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        if not note(Launch(self.kernel, grid, arguments, constants)):
            self.kernel[grid](*arguments, **constants)


class RememberedKernel:
    """Hold a kernel, and what each launch needs, by what `describe` returns of its arguments."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.known: dict[tuple[Any, ...], tuple[Handle, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch the kernel on the current device and stream."""
        described = None if in_rehearsal() else describe(arguments)
        if described is None or watched():
            launch(self.kernel, grid, arguments, constants)
            return
        key, values = described
        active = driver.active
        device = active.get_current_device()
        key += device, *constants.items()
        found = self.known.get(tuple(key))
        if found is None:
            compiled = launch(self.kernel, grid, arguments, constants)
            self._remember(key, compiled, len(arguments), constants)
            return
        handle, rest = found
        width, height, depth = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        handle.launch(width, height, depth, stream, *handle.before, *values, *rest)

    def _remember(self, key: list[Any], compiled: Any, arguments: int, constants: dict[str, Any]) -> None:
        if not is_launched_by_handle(compiled):
            return
        if len(self.known) >= MOST_LAUNCHES:
            self.known.clear()
        # These launches are alike, but may have other descriptors, so Triton makes their maps.
        handle = handle_of(compiled, takes_maps=False)
        self.known[tuple(key)] = handle, constants_in_order(self.kernel, arguments, constants)


def is_launched_by_handle(compiled: Any) -> bool:
    """Return True for a compiled kernel that is launched as `RememberedKernel` launches it."""
    return type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda"


def constants_in_order(kernel: JITFunction, arguments: int, constants: dict[str, Any]) -> list[Any]:
    """Return the values of a kernel's constants, which follow its arguments."""
    rest = kernel.params[arguments:]
    assert all(each.is_constexpr for each in rest), "pass what varies by position"
    return [constants[each.name] for each in rest]


def describe(arguments: tuple[Any, ...]) -> tuple[list[Any], list[Any]] | None:
    """Return what a compiled kernel depends on, and the values to pass.

    Return None for a type that is not known here, or a pointer that is no multiple of 16. Triton
    compiles a kernel for

    * the dtype of each pointer, and whether it is a multiple of 16 (here all are);
    * whether an integer is 1, is a multiple of 16 or needs 64 bits (here each value counts, in
      tuples too);
    * the dtype and the box of a tensor descriptor, in Gluon its layout too.
    """
    key: list[Any] = []
    values: list[Any] = []
    pointers = 0
    for each in arguments:
        kind = type(each)
        if kind is Tensor or kind is nn.Parameter:
            pointer = each.data_ptr()
            pointers |= pointer
            key.append(each.dtype)
            values.append(pointer)
            continue
        values.append(each)
        if each is None or kind is int:
            key.append(each)
        elif kind is float:
            key.append(float)
        elif kind is tuple and INTEGERS.issuperset(map(type, each)):
            key.append(each)
        elif hasattr(each, "block_shape"):  # a tensor descriptor, of Triton or Gluon
            key += kind, each.base.dtype, *each.block_shape, each.padding, getattr(each, "layout", None)
        else:
            return None
    return None if pointers % ALIGNMENT else (key, values)


def watched() -> bool:
    """Return True if a hook watches launches, such as that of Triton's profiler."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
