"""Find how many rows fit a workspace, by running the first rows in chunks of growing size.

The memory of a chunk is counted as the bytes of the tensors that its operators return. These bytes
depend on shapes and dtypes alone, so every rank finds the same number of rows without asking the
others.

At each moment of a chunk, the bytes are linear in the number of rows. The memory of the chunk is
the largest of these numbers. So between two measured sizes it is never above the straight line
through both.
"""

import contextlib
import copy
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.core.errors import ArgumentError
from lowtide.ops.chunked_loss.isolation import isolated
from lowtide.ops.chunked_loss.job import Job, Tensors
from lowtide.ops.chunked_loss.loop import loss_alone, loss_and_gradients
from lowtide.ops.chunked_loss.replay import Replay

GROWTH = 16  # the largest factor from one measured size to the next

# Maps head -> loss_fn -> `key` of rows_within -> (the number of rows that fit, True if these were
# all rows of the job). The owner of a bound method stands for the method.
_measured: Any = weakref.WeakKeyDictionary()


def rows_within(workspace: int, job: Job, tensors: Tensors, functions: tuple[Any, Any]) -> int:
    """Return how many rows of the job fit the workspace.

    `functions` are head and loss_fn. The number is measured once for these functions, the workspace
    and what else is in `key`; then it is kept.
    """
    if job.rows < 2:
        return 1
    # A bound method is a new object on each access, so its owner is the key.
    head, loss_fn = (getattr(function, "__self__", function) for function in functions)
    methods = tuple(getattr(function, "__func__", None) for function in functions)
    try:
        sizes = _measured.setdefault(head, weakref.WeakKeyDictionary()).setdefault(loss_fn, {})
    except TypeError:  # no weak reference to a function: measure every time
        sizes = {}
    dims = len(job.leading)
    shapes = tuple(tensor.shape[dims:] if k < job.cut else tensor.shape for k, tensor in enumerate(tensors))
    kinds = tuple((tensor.dtype, str(tensor.device)) for tensor in tensors)
    key = (methods, workspace, shapes, kinds, job.needs_grad, tuple(job.replay.casts))
    rows, all_of_them = sizes.get(key, (0, True))
    if all_of_them and rows < job.rows:
        # The caller's saved-tensor hooks must see the same tensors in every call, measured or not.
        with isolated():
            rows = _most_rows(workspace, job.rows, lambda rows: _peak(job, tensors, rows))
        sizes[key] = rows, rows == job.rows
    return int(rows)


def _most_rows(workspace: int, limit: int, peak: Callable[[int], int]) -> int:
    """Return how many rows, up to `limit`, fit the workspace; `peak` maps rows to bytes."""
    rows, held = 1, peak(1)
    if held > workspace:
        raise ArgumentError(
            f"workspace must hold a chunk of one row, which takes {held} bytes, got {workspace} bytes"
        )
    slope = held
    while rows < limit:
        more = min(limit, GROWTH * rows, rows + (workspace - held) // max(1, slope))
        if more == rows:
            break
        needed = peak(more)
        if needed > workspace:
            return rows + (workspace - held) * (more - rows) // (needed - held)
        slope = (needed - held) // (more - rows)
        rows, held = more, needed
    return rows


def _peak(job: Job, tensors: Tensors, rows: int) -> int:
    """Return the bytes that a chunk of so many rows takes.

    A chunk of one row runs first and is not measured. It allocates the sums over chunks, which are
    no part of a chunk's memory.
    """
    meter = _Meter()
    sample = replace(
        job,
        chunks=(slice(0, 1), slice(0, rows)),
        aux={},
        own=[],
        meter=lambda place: meter if place else contextlib.nullcontext(),
        replay=Replay(tensors),
        snapshot=copy.copy(job.snapshot),
    )
    with job.replay.forked():
        if any(job.needs_grad):
            loss_and_gradients(sample, tensors)
        else:
            loss_alone(sample, tensors, graph=False)
    return meter.peak


class _Meter(TorchDispatchMode):
    """Count the bytes of the tensors that operators return, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _storages((args, kwargs))
        result = function(*args, **(kwargs or {}))
        for storage in _storages(result) - given:
            if storage not in self.seen:
                self.seen.add(storage)
                self._hold(storage.nbytes())
                weakref.finalize(storage, self._hold, -storage.nbytes())
        return result

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


def _storages(values: Any) -> set[Any]:
    tensors = [each for each in tree_leaves(values) if isinstance(each, Tensor)]
    parts = [[each._indices(), each._values()] if each.is_sparse else [each] for each in tensors]
    return {part.untyped_storage() for each in parts for part in each}
