"""Keep two threads from replacing the parameters of one module at the same time."""

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from lowtide.core import torch_private
from lowtide.core.errors import ArgumentError
from lowtide.ops.chunked_loss.functional.tensors import find_owned

_lock = threading.Lock()
_threads: dict[int, list[int]] = {}  # id of a module -> the threads that run chunks with it


@contextlib.contextmanager
def alone(functions: Iterable[Any]) -> Iterator[None]:
    """Mark the modules of these functions as used by this thread; raise if another uses one.

    Two threads would take each other's copies for the parameters, and would leave them in the
    module. A backward pass is let in, because it may run in threads of its own.
    """
    owned = [each for function in functions for _, each in find_owned(function, "")]
    modules = {id(part) for each in owned if isinstance(each, nn.Module) for part in each.modules()}
    own = threading.get_ident()
    with _lock:
        others = {thread for module in modules for thread in _threads.get(module, ())} - {own}
        if others and torch_private.outside_backward():
            raise ArgumentError(
                "another thread is running chunked_loss with the same module, whose parameters are replaced "
                "meanwhile: run one thread at a time (a lock), or give each its own module (copy.deepcopy)"
            )
        for module in modules:
            _threads.setdefault(module, []).append(own)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _threads[module].remove(own)
                if not _threads[module]:
                    del _threads[module]
