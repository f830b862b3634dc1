"""Compute functions of the rows of deferred logits that no operator has, a chunk of rows at a time.

Shapes: [...] are the rows, V classes; C rows of a chunk, K numbers picked from each.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.core.rowwise.variables import Tensors
from lowtide.deferred.operations.elementwise import is_class_dim
from lowtide.deferred.proxies.counts import FUSED_LOSS
from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import chunks


@handles("amax")
def amax(input: DeferredLogits, dim: Any = (), keepdim: bool = False) -> Any:
    results = of_classes(input, dim, keepdim, 1, lambda z_CV: (z_CV.amax(-1),), picks=True)
    return NotImplemented if results is None else results[0]


@handles("max")
def max_(input: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    results = of_classes(input, dim, keepdim, 2, lambda z_CV: tuple(z_CV.max(-1)), picks=True)
    return NotImplemented if results is None else torch.return_types.max(results)


@handles("topk")
def topk(input: DeferredLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not input.classes_last or class_dim(input, dim) is None:
        return NotImplemented
    results = by_rows(input, 2, lambda z_CV: tuple(z_CV.topk(k, -1, largest, sorted)), picks=True)
    return torch.return_types.topk(results)


def of_classes(
    input: DeferredLogits,
    dim: Any,
    keepdim: bool,
    results: int,
    function: chunks.RowFunction,
    *,
    picks: bool = False,
) -> Tensors | None:
    """Return functions of each row's classes; None if `dim` does not name the classes alone."""
    place = class_dim(input, dim)
    if place is None:
        return None
    found = by_rows(input, results, function, picks=picks)
    return tuple(each.unsqueeze(place) for each in found) if keepdim else found


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
    copies: int = 1,
    picks: bool = False,
) -> Tensors:
    """Return results of the rows, as `chunks.by_rows` does.

    With `picks` they are logits themselves, and logits that are made real later have their bits.
    """
    call = input.head_call
    options: dict[str, Any] = {"copies": copies, "workspace": call.workspace, "as_logits": picks}
    found = chunks.by_rows(input.checked(), input.rows, results, function, *row_tensors, **options)
    call.picked |= picks
    return found


def counted(input: DeferredLogits, result: Tensor) -> Tensor:
    """Count a result of the rows that a loss can be made of, as a loss without logits."""
    return input.head_call.counts.on(result, FUSED_LOSS) if result.requires_grad else result
