"""Record operations that only select, reshape or permute rows and classes."""

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lowtide.deferred.proxies.handlers import handles
from lowtide.deferred.proxies.logits import DeferredLogits
from lowtide.deferred.recorded import expression


@handles(
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"),
    pass_name=True,
)
def reshape(name: str, input: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Arrange the same rows, in the same order, in another shape; the classes stay."""
    args = tuple(each.meta if isinstance(each, DeferredLogits) else each for each in args)
    if any(isinstance(each, Tensor) for each in args[1:]):
        return NotImplemented
    meta = getattr(Tensor, name)(input.meta, *args, **kwargs)
    same = meta.dim() > 0 and meta.shape[-1] == input.classes > 1 and meta.dtype == input.dtype
    if not input.classes_last or not same:
        return NotImplemented
    # Rows keep their order, so a view is contiguous only if what it is a view of is contiguous.
    copied = meta.is_contiguous() and not input.meta.is_contiguous()
    node = input.checked() if copied else input.node
    return input.like(node, meta, meta.dim() - 1, copied=copied, view=("view", meta.shape))


@handles("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", pass_name=True)
def permute(name: str, input: DeferredLogits, *dims: Any, **kwargs: Any) -> Any:
    """Permute the dimensions; this may reorder the rows."""
    function, every = getattr(Tensor, name), range(input.meta.dim())
    meta = function(input.meta, *dims, **kwargs)
    # Probe one dimension at a time: it has size 2, all others 1, so its new place can be found.
    probes = (torch.empty([1 + (each == dim) for each in every], device="meta") for dim in every)
    order = [function(probe, *dims, **kwargs).shape.index(2) for probe in probes]
    rows = [dim for dim in every if dim != input.class_dim]
    moved = sorted(range(len(rows)), key=lambda row: order[rows[row]])
    node = input.node
    if moved != sorted(moved):
        node = _with_rows(input, lambda x: x.permute(*moved, x.dim() - 1))
    return input.like(
        node, meta, order[input.class_dim], view=("permute", sorted(every, key=order.__getitem__))
    )


@handles("contiguous")
def contiguous(input: DeferredLogits, *, memory_format: Any = None) -> DeferredLogits:
    memory_format = memory_format or torch.contiguous_format
    if input.meta.is_contiguous(memory_format=memory_format):
        return input
    return input.like(input.checked(), input.meta.contiguous(memory_format=memory_format), copied=True)


@handles("__getitem__")
def getitem(input: DeferredLogits, index: Any) -> Any:
    """Select rows by any index, and classes by a range or by one target for each row."""
    entries = _entries(index, input) if input.classes_last else None
    if entries is None:
        return NotImplemented
    *rows, classes = entries
    if isinstance(classes, Tensor) and rows and all(isinstance(each, Tensor) for each in rows):
        if any(each.dtype == torch.bool or each.shape != classes.shape for each in entries):
            return NotImplemented
        # A negative index counts from the end; gather does not support it.
        classes = torch.where(classes < 0, classes + input.classes, classes).long()
        return _rows(input, tuple(rows)).gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    if not isinstance(classes, slice):
        return NotImplemented
    if classes != slice(None):
        if expression.mixes_classes(input.node):
            return NotImplemented
        cut = dict.fromkeys(("weights", "vectors"), lambda tensor: tensor[classes])
        node = expression.with_tensors(input.checked(), **cut)
        input = input.like(node, input.meta[..., classes], view=("__getitem__", (..., classes)))
    every = all(isinstance(each, slice) and each == slice(None) for each in rows)
    return input if every else _rows(input, tuple(rows))


def _entries(index: Any, input: DeferredLogits) -> list[Any] | None:
    """Return the index with one entry for each dimension, or None.

    A mask is one entry for all the dimensions that it covers, which must not include the last. Any
    other index gives None, including one that torch has to refuse.
    """
    entries = [_as_tensor(each, input.device) for each in (index if isinstance(index, tuple) else (index,))]
    width = 0
    for each in entries:
        if isinstance(each, Tensor):
            if each.dtype not in INDEX_DTYPES:
                return None
            width += each.dim() if each.dtype == torch.bool else 1
        elif isinstance(each, (int, slice)) and not isinstance(each, bool):
            width += 1
        elif each is not Ellipsis:
            return None
    ellipses = [place for place, each in enumerate(entries) if each is Ellipsis]
    if len(ellipses) > 1 or width > input.dim():
        return None
    place = ellipses[0] if ellipses else len(entries)
    entries[place : place + 1] = [slice(None)] * (input.dim() - width)
    last = entries[-1]
    return None if isinstance(last, Tensor) and last.dtype == torch.bool else entries


# A byte tensor is a mask or an index, depending on the version of torch.
INDEX_DTYPES = (torch.bool, torch.int64, torch.int32)


def _as_tensor(entry: Any, device: torch.device) -> Any:
    """Return the tensor that a list of integers or truth values stands for.

    Other lists mean different things in different versions of torch.
    """
    kinds = {type(each) for each in entry} if isinstance(entry, list) else set()
    return torch.tensor(entry, device=device) if kinds in ({int}, {bool}) else entry


def _rows(input: DeferredLogits, index: tuple[Any, ...]) -> DeferredLogits:
    node = _with_rows(input, lambda x: x[index])
    if all(isinstance(each, (int, slice)) for each in index):  # A view, with a view's strides.
        meta = input.meta[index]
        return input.like(node, meta, meta.dim() - 1, view=("__getitem__", index))
    rows = expression.hidden(node).shape[:-1]
    meta = torch.empty((*rows, input.classes), dtype=input.dtype, device="meta")
    # torch takes a tensor of one integer for a number, which selects a view.
    copied = any(isinstance(each, Tensor) and (each.dim() > 0 or each.dtype == torch.bool) for each in index)
    return input.like(node, meta, meta.dim() - 1, copied=copied)


def _with_rows(input: DeferredLogits, change: expression.Change) -> expression.Node:
    """Return the node with changed inputs, which first take the shape of the logits' rows."""
    return expression.with_tensors(
        input.checked(), rows=lambda x: change(x.reshape(*input.rows, x.shape[-1]))
    )


# Each handler below first runs on the meta tensor, so that torch checks dimensions, sizes and
# indices.


@handles("select")
def select(input: DeferredLogits, dim: int, index: int) -> Any:
    if not isinstance(index, int):
        return NotImplemented
    input.meta.select(dim, index)
    return input[_at(input, dim, index)]


@handles("narrow")
def narrow(input: DeferredLogits, dim: int, start: Any, length: int) -> Any:
    if not isinstance(start, int):
        return NotImplemented
    size = input.meta.narrow(dim, start, length).shape[dim]
    start += input.shape[dim] * (start < 0)
    return input[_at(input, dim, slice(start, start + size))]


@handles("split")
def split(
    input: DeferredLogits, split_size_or_sections: Any = None, dim: int = 0, *, split_size: Any = None
) -> Any:
    sizes = split_size_or_sections if split_size is None else split_size
    parts = torch.Tensor.split(input.meta, sizes, dim)
    ends = list(itertools.accumulate(part.shape[dim] for part in parts))
    return _several(input, dim, [slice(start, end) for start, end in zip([0, *ends], ends)])


@handles("chunk")
def chunk(input: DeferredLogits, chunks: int, dim: int = 0) -> Any:
    return input.split([part.shape[dim] for part in input.meta.chunk(chunks, dim)], dim)


@handles("unbind")
def unbind(input: DeferredLogits, dim: int = 0) -> Any:
    return _several(input, dim, range(len(input.meta.unbind(dim))))


def _several(input: DeferredLogits, dim: int, entries: Iterable[Any]) -> tuple[Any, ...]:
    parts = tuple(input[_at(input, dim, entry)] for entry in entries)
    for part in parts:
        if isinstance(part, DeferredLogits):
            part.one_of_several = True
    return parts


def _at(input: DeferredLogits, dim: int, entry: Any) -> tuple[Any, ...]:
    """Return an index that has `entry` at an existing dimension."""
    return (*(slice(None),) * (dim % input.dim()), entry)


CREATING = ("zeros", "ones", "empty", "full")


@handles(
    *(f"{name}_like" for name in CREATING), *(f"new_{name}" for name in (*CREATING, "tensor")), pass_name=True
)
def create(name: str, input: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
    """Create a tensor that takes at most shape, dtype and device from the logits."""
    if name.endswith("_like"):
        return getattr(torch, name)(input.meta, *args, **{"device": input.device} | kwargs)
    return getattr(torch.empty(0, dtype=input.dtype, device=input.device), name)(*args, **kwargs)
