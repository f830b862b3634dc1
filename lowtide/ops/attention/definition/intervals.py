"""Compute the interval of keys that each query sees, and keep it for later calls.

A query sees a key if it attends to the key. With each mask of masks.py a query sees one interval of
keys, and the intervals of later queries begin and end no earlier. So a mask is two vectors of M
numbers. From these vectors the kernels know which tiles to skip, which to take whole, and in which
to mask single scores.

Shapes: M queries, N keys; i counts queries, j keys.
"""

import contextlib
from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lowtide.core.operator import seen_by_nobody

T = TypeVar("T")
# Two for each mask that is trained with.
MOST_KEPT = 32
MISSING = object()


class Band(NamedTuple):
    """Hold the band of keys that a query sees: -left <= j - i - offset <= right.

    None is no limit. The offset is 0, or N - M if the band is counted from the bottom right. Then
    the diagonal j = i + offset ends at the last query and the last key.
    """

    left: int | None = None
    right: int | None = None
    from_bottom_right: bool = False


class Intervals(NamedTuple):
    """Hold the interval of keys that each query i sees, first_i <= j < end_i.

    Both vectors are non-decreasing.
    """

    first_M: Tensor  # int32
    end_M: Tensor  # int32


def of_bands(
    bands: Sequence[Band], starts: tuple[Tensor, Tensor] | None, M: int, N: int, device: torch.device
) -> Intervals | None:
    """Return the keys that lie in all bands; None if these are all keys.

    `starts` are where sequences start among queries and among keys, and where the last ends. A
    query then sees the keys of its own sequence alone.
    """
    bands = [band for band in bands if (band.left, band.right) != (None, None)]
    if starts is None and not bands:
        return None
    row_M = torch.arange(M, dtype=torch.int32, device=device)
    # Without sequences these stay plain numbers: on CUDA a vector operation takes the host 5 us.
    low: Any = 0
    high: Any = N
    offset: Any = N - M
    if starts is not None:
        q_starts, k_starts = starts
        block_M = torch.searchsorted(q_starts[1:], row_M, right=True)
        low, high = k_starts[block_M], k_starts[block_M + 1]
        row_M = row_M - q_starts[block_M] + low  # the key at the query's position in the sequence
        offset = high - low - (q_starts[block_M + 1] - q_starts[block_M])
    firsts, ends = [], []
    for band in bands:
        shift = offset if band.from_bottom_right else 0
        if band.left is not None:
            firsts.append((row_M + (shift - band.left)).clamp(low, high))
        if band.right is not None:
            ends.append((row_M + (shift + band.right + 1)).clamp(low, high))
    first_M = reduce(torch.maximum, firsts) if firsts else _vector(low, row_M)
    end_M = reduce(torch.minimum, ends) if ends else _vector(high, row_M)
    return Intervals(first_M, end_M)


def _vector(bound: int | Tensor, like: Tensor) -> Tensor:
    """Return the bound as a vector like `like`."""
    return bound if isinstance(bound, Tensor) else torch.full_like(like, bound)


def rows_of_keys(first_M: Tensor, end_M: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Return the first query that sees each key and the last + 1, as two vectors [N]."""
    key_N = torch.arange(N, dtype=torch.int32, device=first_M.device)
    row_first_N = torch.searchsorted(end_M, key_N, right=True, out_int32=True)
    row_end_N = torch.searchsorted(first_M, key_N, right=True, out_int32=True)
    return torch.minimum(row_first_N, row_end_N), row_end_N


def visible(found: Intervals, N: int) -> Tensor:
    """Return the mask as a dense matrix [M, N], True where query i sees key j."""
    key_N = torch.arange(N, dtype=torch.int32, device=found.first_M.device)
    return (key_N >= found.first_M[:, None]) & (key_N < found.end_M[:, None])


class VectorCache:
    """Keep vectors for later calls, those of the last MOST_KEPT keys."""

    def __init__(self) -> None:
        self.known: dict[Hashable, Any] = {}

    def get(self, key: Hashable, device: torch.device, compute: Callable[[], T]) -> T:
        """Return what an earlier call computed for this key; compute it if none did.

        Compiled code must not read what is kept, or it would be compiled again when that changes.
        """
        if not may_keep(device):
            return compute()
        stream = None
        if device.type == "cuda":
            # A call on another stream would not wait for the vectors.
            stream = torch.cuda.current_stream(device).stream_id
            device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        # Autograd saves no vectors that inference mode has made.
        key = key, device, stream, torch.is_inference_mode_enabled()
        found: Any = self.known.get(key, MISSING)
        if found is MISSING:
            found = self.known[key] = compute()
            if len(self.known) > MOST_KEPT:
                with contextlib.suppress(StopIteration, RuntimeError):  # another thread changes it
                    self.known.pop(next(iter(self.known)), None)
        return found  # type: ignore[no-any-return]


def may_keep(device: torch.device) -> bool:
    """Return True if vectors that are computed now are of use to later calls.

    Modes, such as that of selective checkpoints, must see the same operators in each call.
    Transforms wrap what is made in them. A CUDA graph may reuse the memory of what is made in its
    capture. On other devices streams are not looked at.
    """
    if torch.compiler.is_compiling() or not seen_by_nobody(()):
        return False
    if device.type == "cuda":
        return not torch.cuda.is_current_stream_capturing()
    return device.type == "cpu"
