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
_threads: dict[int, list[int]] = {}  # module -> the threads that run chunks with it


@contextlib.contextmanager
def alone(functions: Iterable[Any]) -> Iterator[None]:
    """Keep other threads from running chunks with any module of these functions.

    Another thread would find, and leave behind, the copies that replace the parameters. A backward
    pass may run in threads of its own and is let in.
    """
    owned = [each for function in functions for _, each in find_owned(function, "")]
    modules = {id(part) for each in owned if isinstance(each, nn.Module) for part in each.modules()}
    own = threading.get_ident()
    with _lock:
        others = {thread for module in modules for thread in _threads.get(module, ())} - {own}
        if others and torch_private.outside_backward():
            raise ArgumentError(
                "another thread is running chunked_loss with the same module, whose parameters are replaced "
                "meanwhile: one at a time (a lock), or a module for each thread (copy.deepcopy)"
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
