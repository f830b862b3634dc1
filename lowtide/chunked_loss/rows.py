"""Tensors by rows, whatever their leading dimensions and strides."""

import math
from itertools import pairwise

import torch
from torch import Tensor


def cut(tensor: Tensor, dims: int, start: int, stop: int) -> Tensor:
    """Rows [start, stop) of a tensor with `dims` leading dimensions, as [c, ...]: a view, or a copy of these
    rows alone where a view will not do (`hidden[:, :-1]`)."""
    if dims == 1:
        return tensor[start:stop]
    leading = tensor.shape[:dims]
    if _is_flat(tensor, dims):
        return tensor.view(math.prod(leading), *tensor.shape[dims:])[start:stop]
    place = torch.arange(start, stop, device=tensor.device)
    places = []  # one index a dimension; torch.unravel_index would wait for the device
    for size in reversed(leading):
        places.append(place % size)
        place = place // size
    return tensor[tuple(reversed(places))]


def _is_flat(tensor: Tensor, dims: int) -> bool:
    """Whether the leading dimensions are one in memory."""
    sizes, strides = tensor.shape[:dims], tensor.stride()[:dims]
    if tensor.numel() == 0:
        return True
    kept = [(size, stride) for size, stride in zip(sizes, strides) if size > 1]
    return all(outer == size * stride for (_, outer), (size, stride) in pairwise(kept))
