"""Launch a compiled kernel by the C function that Triton's launcher calls.

The launcher's Python takes the host as long as that function. In each launch it also makes a
tensor map of each descriptor. A map depends on its descriptor and on where the tensor begins, which
repeats from step to step, so here maps are kept by address.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import triton

# Releases of Triton that call this function with the arguments that `handle_of` passes. A launch
# with other arguments would crash, so only releases that were tested on a card are listed.
KNOWN = ("3.6.",)
MOST_MAPS = 64  # the most maps of a descriptor, at some 300 bytes each; then all are dropped


class Handle(NamedTuple):
    """Hold a function that launches a kernel, and what it takes before the kernel's values.

    It is called with the grid's three sizes, the stream, `before`, and the values.
    """

    launch: Callable[..., None]
    before: tuple[Any, ...]
    map_metadata: Sequence[Any] | None = None
    """The metadata of each descriptor's map; None if the values are the descriptors themselves."""


def handle_of(compiled: Any, *, takes_maps: bool = True) -> Handle:
    """Return the quickest way to launch a compiled kernel that is known to work."""
    run = compiled.run
    by_triton = Handle(run, (compiled.function, compiled.packed_metadata, None, None, None))
    if type(run).__name__ != "CudaLauncher" or not triton.__version__.startswith(KNOWN):
        return by_triton
    if run.global_scratch_size or run.profile_scratch_size:
        return by_triton
    launch, metadata = run.launch, []
    if inspect.isfunction(launch):  # it makes the maps, and then calls the function
        inner = inspect.getclosurevars(launch).nonlocals
        launch, metadata = inner["launcher"], inner["tensordesc_meta"]
        if not takes_maps or None in metadata:
            return by_triton
    before = (
        compiled.function, run.launch_cooperative_grid, run.launch_pdl, None, None, compiled.packed_metadata,
        None, None, None,
    )  # fmt: skip
    return Handle(launch, before, metadata)


class TensorMaps(dict[int, list[Any]]):
    """Hold what a kernel is given for a descriptor, by the address at which its tensor begins."""

    def __init__(self, descriptor: Any, metadata: Any) -> None:
        super().__init__()
        self.descriptor, self.metadata = copy.copy(descriptor), metadata

    def __missing__(self, address: int) -> list[Any]:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= MOST_MAPS:
            self.clear()
        descriptor = copy.copy(self.descriptor)
        descriptor.base = _Beginning(address)
        self[address] = values = make_tensordesc_arg(descriptor, self.metadata)
        return values


class _Beginning(NamedTuple):
    """Hold the address at which a tensor begins, in place of the tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address
