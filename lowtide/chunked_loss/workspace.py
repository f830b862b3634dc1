"""How many rows a chunk may have, from the bytes that it may take.

They are counted as the operators hand out tensors, in chunks of growing size: a number that depends on
shapes alone, so that every rank finds the same without asking the others. Memory is the largest of several
sums, each straight in the number of rows; so between two measured sizes it stays below the line through
both.
"""

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.chunked_loss.check import ArgumentError
from lowtide.chunked_loss.gradients import form, loss_alone
from lowtide.chunked_loss.job import Job, Tensors
from lowtide.chunked_loss.replay import Replay

GROWTH = 16  # from one measured size to the next, at most

_known: Any = weakref.WeakKeyDictionary()  # head -> loss_fn -> kinds of tensors -> rows


def rows_within(workspace: int, job: Job, tensors: Tensors, functions: tuple[Any, Any]) -> int:
    """Measured once for these two functions and these kinds of tensors, then kept."""
    if job.rows < 2:
        return 1
    head, loss_fn = functions
    try:
        sizes = _known.setdefault(head, weakref.WeakKeyDictionary()).setdefault(loss_fn, {})
    except TypeError:  # what has no weak references is measured every time
        sizes = {}
    key = (workspace, *_signature(tensors, job))
    rows, all_of_them = sizes.get(key, (0, True))
    if all_of_them and rows < job.rows - 1:
        rows = _largest(workspace, job.rows - 1, lambda rows: _peak(job, tensors, rows))
        sizes[key] = rows, rows == job.rows - 1
    return int(rows)


def _largest(workspace: int, limit: int, peak: Callable[[int], int]) -> int:
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
        found = peak(more)
        if found > workspace:
            return rows + (workspace - held) * (more - rows) // (found - held)
        slope = (found - held) // (more - rows)
        rows, held = more, found
    return rows


def _peak(job: Job, tensors: Tensors, rows: int) -> int:
    """Bytes that a chunk of so many rows takes, after a first one that makes room for the sums."""
    meter = Meter()
    sample = replace(
        job,
        chunks=((0, 1), (1, 1 + rows)),
        aux={},
        meter=lambda place: meter if place else contextlib.nullcontext(),
        replay=Replay(tensors),
    )
    with torch.random.fork_rng(devices=job.replay.cuda):
        if any(job.wanted):
            form(sample, tensors)
        else:
            loss_alone(sample, tensors, graph=False)
    return meter.peak


def _signature(tensors: Tensors, job: Job) -> Any:
    dims = len(job.leading)
    shapes = tuple(tensor.shape[dims:] if k < job.cut else tensor.shape for k, tensor in enumerate(tensors))
    kinds = tuple((tensor.dtype, str(tensor.device)) for tensor in tensors)
    return shapes, kinds, job.wanted, tuple(job.replay.casts)


class Meter(TorchDispatchMode):
    """Counts the bytes of every tensor that an operator makes, from its making to its end."""

    def __init__(self) -> None:
        super().__init__()
        self.held = self.peak = 0
        self.seen: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        found = function(*args, **(kwargs or {}))
        for each in tree_leaves(found):
            if (
                isinstance(each, Tensor)
                and (storage := _storage(each)) not in given
                and storage not in self.seen
            ):
                self.seen.add(storage)
                self._hold(storage.nbytes())
                weakref.finalize(storage, self._hold, -storage.nbytes())
        return found

    def _hold(self, nbytes: int) -> None:
        self.held += nbytes
        self.peak = max(self.peak, self.held)


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()
