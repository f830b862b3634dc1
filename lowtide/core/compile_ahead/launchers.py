"""Let threads load the C functions that launch kernels, each as a module of its own name.

Up to version 3.6 Triton builds a C module for each list of argument types. All have one name.
CPython loads such a module for the second time into the last one of that name, whatever its file.
So a thread that has just loaded a module may find the function of another thread's kernel in it.
That function reads the arguments as those of the other kernel.
"""

import itertools
from types import ModuleType

from triton.runtime import build

LOAD = "_load_module_from_path"  # since Triton 3.5; older versions are not supported
PACKAGE = "lowtide_launchers"  # no such package exists; the name only has to be another one each time


def load_apart() -> None:
    """Make Triton load each of its C modules under another name from now on."""
    load = getattr(build, LOAD, None)
    if load is None or hasattr(load, "original"):
        return
    numbers = itertools.count()

    def load_module(name: str, path: str) -> ModuleType:
        return load(f"{PACKAGE}_{next(numbers)}.{name}", path)

    load_module.original = load  # type: ignore[attr-defined]
    setattr(build, LOAD, load_module)
