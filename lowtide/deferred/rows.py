"""What changes only which rows and which classes there are, and how they are laid out."""

import itertools
import operator
from typing import Any

import torch
from torch import Tensor

from lowtide.deferred import tree
from lowtide.deferred.logits import DeferredLogits, handles


def _reshaping(name: str) -> None:
    @handles(name)
    def reshape(input: Any, *args: Any, **kwargs: Any) -> Any:
        """Other rows, in the same order, of the same classes."""
        args = tuple(each.meta if isinstance(each, DeferredLogits) else each for each in args)
        if not isinstance(input, DeferredLogits) or any(isinstance(each, Tensor) for each in args[1:]):
            return NotImplemented
        meta = getattr(Tensor, name)(input.meta, *args, **kwargs)
        same = meta.dim() > 0 and meta.shape[-1] == input.classes > 1 and meta.dtype == input.dtype
        if not input.classes_last or not same:
            return NotImplemented
        return input.like(input.node, meta, meta.dim() - 1)


for _name in ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as", "reshape_as"):
    _reshaping(_name)


def _permuting(name: str, method: str) -> None:
    @handles(name)
    def permute(input: Any, *dims: Any, **kwargs: Any) -> Any:
        """Another order of the dimensions, and perhaps of the rows."""
        meta = getattr(Tensor, method)(input.meta, *dims, **kwargs)
        # One dimension after the other, so that where each went shows by its index.
        order = [
            getattr(Tensor, method)(_probe(input.meta.dim(), dim), *dims, **kwargs).shape.index(2)
            for dim in range(input.meta.dim())
        ]
        new_place = order[input.class_dim]
        rows = [dim for dim in range(input.meta.dim()) if dim != input.class_dim]
        moved = sorted(range(len(rows)), key=lambda row: order[rows[row]])
        node = input.node
        if moved != sorted(moved):
            node = tree.changed(_in_shape(input), rows=lambda x: x.permute(*moved, x.dim() - 1))
        return input.like(node, meta, new_place)


def _probe(dims: int, dim: int) -> Tensor:
    return torch.empty([2 if each == dim else 1 for each in range(dims)], device="meta")


for _name in ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t"):
    _permuting(_name, _name)


@handles("contiguous")
def contiguous(input: DeferredLogits, *, memory_format: Any = None) -> DeferredLogits:
    meta = input.meta
    return input.like(input.node, torch.empty(meta.shape, dtype=meta.dtype, device="meta"))


@handles("__getitem__")
def getitem(input: DeferredLogits, index: Any) -> Any:
    """Rows by any index; of the classes a range, or a target for each row."""
    entries = _entries(index, input) if input.classes_last else None
    if entries is None:
        return NotImplemented
    *rows, classes = entries
    if isinstance(classes, Tensor) and rows and all(isinstance(each, Tensor) for each in rows):
        if any(each.dtype == torch.bool or each.shape != classes.shape for each in entries):
            return NotImplemented
        return _rows(input, tuple(rows)).gather(-1, classes.unsqueeze(-1)).squeeze(-1)
    if not isinstance(classes, slice):
        return NotImplemented
    if classes != slice(None):
        if tree.mixes_classes(input.node):
            return NotImplemented
        node = tree.changed(input.node, classes=lambda tensor: tensor[classes])
        input = input.like(node, input.meta[..., classes])
    every = all(isinstance(each, slice) and each == slice(None) for each in rows)
    return input if every else _rows(input, tuple(rows))


def _entries(index: Any, input: DeferredLogits) -> list[Any] | None:
    """One a dimension (a mask: one for several, not the last); None for an index that is something else."""
    entries = list(index) if isinstance(index, tuple) else [index]
    entries = [
        torch.tensor(each, device=input.device) if isinstance(each, list) else each for each in entries
    ]
    width = 0
    for each in entries:
        if isinstance(each, Tensor) and each.dtype == torch.bool:
            width += each.dim()
        elif isinstance(each, (int, slice, Tensor)) and not isinstance(each, bool):
            width += 1
        elif each is not Ellipsis:
            return None
    rest = [slice(None)] * (input.meta.dim() - width)
    place = next((place for place, each in enumerate(entries) if each is Ellipsis), len(entries))
    entries[place : place + 1] = rest
    last = entries[-1]
    return None if isinstance(last, Tensor) and last.dtype == torch.bool else entries


def _rows(input: DeferredLogits, index: tuple[Any, ...]) -> DeferredLogits:
    node = tree.changed(_in_shape(input), rows=lambda x: x[index])
    shape = (*tree.first(node).input.shape[:-1], input.classes)
    meta = torch.empty(shape, dtype=input.dtype, device="meta")
    return input.like(node, meta, len(shape) - 1)


def _in_shape(input: DeferredLogits) -> tree.Node:
    """The node, its inputs having the rows' shape."""
    return tree.changed(input.node, rows=lambda x: x.reshape(*input.rows, x.shape[-1]))


@handles("select")
def select(input: DeferredLogits, dim: int, index: int) -> Any:
    return input[_at(input, dim, index)]


@handles("narrow")
def narrow(input: DeferredLogits, dim: int, start: int, length: int) -> Any:
    return input[_at(input, dim, slice(start, start + length))]


@handles("split")
def split(input: DeferredLogits, split_size_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    sizes = named.get("split_size", split_size_or_sections)
    parts = torch.Tensor.split(input.meta, sizes, dim)
    ends = list(itertools.accumulate(part.shape[dim] for part in parts))
    return tuple(input[_at(input, dim, slice(start, end))] for start, end in zip([0, *ends], ends))


@handles("chunk")
def chunk(input: DeferredLogits, chunks: int, dim: int = 0) -> Any:
    return input.split([part.shape[dim] for part in input.meta.chunk(chunks, dim)], dim)


@handles("unbind")
def unbind(input: DeferredLogits, dim: int = 0) -> Any:
    return tuple(input[_at(input, dim, place)] for place in range(input.shape[dim]))


def _at(input: DeferredLogits, dim: int, entry: Any) -> tuple[Any, ...]:
    return (*(slice(None),) * (operator.index(dim) % input.meta.dim()), entry)


def _creating(name: str) -> None:
    @handles(name)
    def create(input: DeferredLogits, *args: Any, **kwargs: Any) -> Any:
        """A tensor of its own, which takes from the logits at most the shape, dtype and device."""
        if name.endswith("_like"):
            return getattr(torch, name)(input.meta, *args, **{"device": input.device} | kwargs)
        return getattr(torch.empty(0, dtype=input.dtype, device=input.device), name)(*args, **kwargs)


for _name in ("zeros", "ones", "empty", "full"):
    _creating(f"{_name}_like")
    _creating(f"new_{_name}")
_creating("new_tensor")
