"""Compute functions of the rows of deferred logits that no operator has, a chunk of rows at a time.

Shapes: [...] are the rows, V classes; C rows of a chunk, K numbers picked from each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowtide.deferred.operations.elementwise import is_class_dim
from lowtide.deferred.proxies.counts import FUSED_LOSS
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import chunks


@handles("argmax", "sum", "mean", pass_name=True)
def reduce(
    name: str, input: DeferredLogits, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    options = {} if dtype is None else {"dtype": dtype}
    return counted(input, reduced_rows(input, dim, keepdim, lambda z_CV: getattr(z_CV, name)(-1, **options)))


@handles("amax")
def amax(input: DeferredLogits, dim: Any = (), keepdim: bool = False) -> Any:
    place = class_dim(input, dim)
    if place is None:
        return NotImplemented
    (result,) = pick(input, 1, lambda z_CV: (z_CV.amax(-1),))
    return result.unsqueeze(place) if keepdim else result


@handles("max")
def max_(input: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    place = class_dim(input, dim)
    if place is None:
        return NotImplemented
    results = pick(input, 2, lambda z_CV: tuple(z_CV.max(-1)))
    return torch.return_types.max(each.unsqueeze(place) if keepdim else each for each in results)


@handles("topk")
def topk(input: DeferredLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not input.classes_last or class_dim(input, dim) is None:
        return NotImplemented
    return torch.return_types.topk(pick(input, 2, lambda z_CV: tuple(z_CV.topk(k, -1, largest, sorted))))


def reduced_rows(input: DeferredLogits, dim: Any, keepdim: bool, function: Callable[[Tensor], Tensor]) -> Any:
    place = class_dim(input, dim)
    if place is None:
        return NotImplemented
    (result,) = by_rows(input, 1, lambda z_CV: (function(z_CV),))
    return result.unsqueeze(place) if keepdim else result


def counted(input: DeferredLogits, result: Any) -> Any:
    """Count a result of the rows that a loss can be made of, as a loss without logits."""
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result
    return input.head_call.counts.on(result, FUSED_LOSS)


def class_dim(input: DeferredLogits, dim: Any) -> int | None:
    """Return the dimension of the classes if `dim` names only that one, else None."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    return input.class_dim if is_class_dim(input, dim) else None


def by_rows(
    input: DeferredLogits,
    results: int,
    function: chunks.RowFunction,
    *row_tensors: Tensor,
    chunk_sizes: dict[Any, int] | None = None,
) -> tuple[Tensor, ...]:
    options: dict[str, Any] = {"workspace": input.head_call.workspace, "chunk_sizes": chunk_sizes}
    return chunks.by_rows(input.checked(), input.rows, results, function, *row_tensors, **options)


def pick(
    input: DeferredLogits, results: int, function: chunks.RowFunction, *row_tensors: Tensor
) -> tuple[Tensor, ...]:
    """Return values that are logits themselves; logits made real later will have the same bits."""
    sizes = input.head_call.chunk_sizes
    return by_rows(input, results, function, *row_tensors, chunk_sizes=sizes)
