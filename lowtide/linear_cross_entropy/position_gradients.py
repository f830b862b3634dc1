"""The gradients of a K-dimensional loss, put together one position after the other: what positions share is
added up in float32, a position's own is rounded as that of a single head.

Shapes: N tokens, D features, V classes, P positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.linear_cross_entropy.gradients import Gradients, Kept
from lowtide.linear_cross_entropy.head import Head
from lowtide.linear_cross_entropy.route import Wanted
from lowtide.linear_cross_entropy.scaling import scaled

# Of input, weight, bias, scale: which a position has of its own.
OWN = False, True, True, False


def kept_dtype(place: int, dtype: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
    """Of a gradient of the tensor in that place. What is kept in float16 waits with a power of two
    (scaling.py), and each position would have another."""
    return dtype if OWN[place] and dtype != torch.float16 else sum_dtype


def widened(head: Head, wanted: Sequence[bool]) -> Head:
    """A head whose input has the dtype of its gradient's sum, where there is one."""
    (input,) = head.inputs
    wide = input.to(torch.promote_types(input.dtype, torch.float32)) if wanted[0] else input
    return head._replace(inputs=(wide,))


def held_beside(head: Head, wanted: Sequence[bool], sum_dtype: torch.dtype) -> int:
    """Bytes, beside what a call of one position holds: its gradients, which that call would return, and a
    wide input."""
    (input,), (weight,) = head.inputs, head.weights
    shared = input.numel() * sum_dtype.itemsize * wanted[0]
    wide = shared if input.dtype != sum_dtype else 0
    return shared + wide + weight.select(1, 0).numel() * sum_dtype.itemsize * wanted[1]


class PositionGradients:
    def __init__(self, head: Head, wanted: Wanted, sum_dtype: torch.dtype, backend: str) -> None:
        """`head`: of all positions."""
        self.sum_dtype, self.backend = sum_dtype, backend
        one = torch.ones((), dtype=sum_dtype, device=head.device)

        def keep(place: int, like: Tensor | None, grad: bool) -> Kept | None:
            if like is None or not grad:
                return None
            make = torch.empty if OWN[place] else torch.zeros
            dtype = kept_dtype(place, like.dtype, sum_dtype)
            return Kept(make(like.shape, dtype=dtype, device=like.device), None, one)

        wants = (*wanted.inputs, *wanted.weights, wanted.bias, wanted.scale)
        dx, dw, db, dscale = (keep(*each) for each in zip(range(4), head.tensors, wants))
        self.gradients = Gradients((dx,), (dw,), db, dscale)

    def add(self, position: int, gradients: Gradients) -> None:
        for own, whole, part in zip(OWN, self.gradients.all, gradients.all):
            if whole is None or part is None:
                continue
            found = part.tensor
            if part.pending is not None:
                found = scaled(found, part.pending, self.sum_dtype, self.backend, in_place=True)
            if own:
                whole.tensor[:, position].copy_(found)
            else:
                whole.tensor.add_(found)
