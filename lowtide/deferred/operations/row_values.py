"""Compute functions of the rows of deferred logits that no operator has, a chunk of rows at a time.

Shapes: [...] are the rows, V classes; C rows of a chunk, K numbers picked from each.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.core.row_function import Tensors
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
    dims = _dims_with_classes(input, dim)
    if name != "argmax" and dims and class_dim(input, dim) is None:
        return _total(name, input, dims, keepdim, options)
    results = _of_classes(input, dim, keepdim, 1, lambda z_CV: (getattr(z_CV, name)(-1, **options),))
    return NotImplemented if results is None else counted(input, results[0])


def _dims_with_classes(input: DeferredLogits, dim: Any) -> tuple[int, ...]:
    """Return the dimensions that `dim` names if the one of the classes is among them, else ()."""
    named = tuple(dim) if isinstance(dim, (tuple, list)) else () if dim is None else (dim,)
    if not all(isinstance(each, int) and -input.dim() <= each < input.dim() for each in named):
        return ()
    dims = tuple({each % input.dim() for each in named or range(input.dim())})
    # torch raises its own error for a dimension that is named twice.
    return dims if input.class_dim in dims and len(named) in (0, len(dims)) else ()


def _total(name: str, input: DeferredLogits, dims: tuple[int, ...], keepdim: bool, options: Any) -> Any:
    """Sum or average over classes and rows, in float32 at least, as torch does."""
    dtype = getattr(torch.empty((), dtype=input.dtype, device=input.device), name)(**options).dtype
    if torch.compiler.is_compiling() or not dtype.is_floating_point:  # the first would break the graph
        return NotImplemented
    wide = torch.promote_types(dtype, torch.float32)
    (sums,) = by_rows(input, 1, lambda z_CV: (z_CV.sum(-1, dtype=wide),))
    total = sums.unsqueeze(input.class_dim).sum(dims, keepdim)
    if name == "mean":
        total = total / math.prod(input.shape[each] for each in dims)
    return counted(input, total.to(dtype))


@handles("amax")
def amax(input: DeferredLogits, dim: Any = (), keepdim: bool = False) -> Any:
    results = _of_classes(input, dim, keepdim, 1, lambda z_CV: (z_CV.amax(-1),), picks=True)
    return NotImplemented if results is None else results[0]


@handles("max")
def max_(input: DeferredLogits, dim: Any = None, keepdim: bool = False) -> Any:
    results = _of_classes(input, dim, keepdim, 2, lambda z_CV: tuple(z_CV.max(-1)), picks=True)
    return NotImplemented if results is None else torch.return_types.max(results)


@handles("topk")
def topk(input: DeferredLogits, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if not input.classes_last or class_dim(input, dim) is None:
        return NotImplemented
    results = by_rows(input, 2, lambda z_CV: tuple(z_CV.topk(k, -1, largest, sorted)), picks=True)
    return torch.return_types.topk(results)


def _of_classes(
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
    picks: bool = False,
) -> Tensors:
    """Return results of the rows, as `chunks.by_rows` does.

    With `picks` they are logits themselves, and logits that are made real later have their bits.
    """
    call = input.head_call
    options: dict[str, Any] = {"workspace": call.workspace, "as_logits": picks}
    found = chunks.by_rows(input.checked(), input.rows, results, function, *row_tensors, **options)
    call.picked |= picks
    return found


def counted(input: DeferredLogits, result: Tensor) -> Tensor:
    """Count a result of the rows that a loss can be made of, as a loss without logits."""
    return input.head_call.counts.on(result, FUSED_LOSS) if result.requires_grad else result
