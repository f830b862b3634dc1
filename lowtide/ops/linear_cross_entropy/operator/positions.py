"""The gradients of a K-dimensional loss, put together one position after the other: what positions share, and
a bias, in float32; a position's part of the weight's is rounded into its place (decision 0051).

Shapes: N tokens, D features, V classes, P positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.core.pending_gradient import scale_into
from lowtide.ops.linear_cross_entropy.definition.head import Head
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients, Kept
from lowtide.ops.linear_cross_entropy.planning.requirements import Wanted

# Of input, weight, bias, scale: which a position has of its own.
OWN = False, True, True, False
WEIGHT = 1


def kept_dtype(place: int, dtype: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
    """Of a gradient of the tensor in that place, until backward. What is kept in float16 waits with a power
    of two (pending_gradient.py), and each position would have another."""
    return dtype if place == WEIGHT and dtype != torch.float16 else sum_dtype


def widened(head: Head, wanted: Sequence[bool], sum_dtype: torch.dtype) -> Head:
    """A head whose input has the dtype of its gradient's sum, where there is one."""
    (input,) = head.inputs
    return head._replace(inputs=(input.to(sum_dtype) if wanted[0] else input,))


class PositionGradients:
    def __init__(self, head: Head, wanted: Wanted, sum_dtype: torch.dtype) -> None:
        """`head`: of all positions."""
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
        """One position's, whose memory is free afterwards."""
        for own, whole, part in zip(OWN, self.gradients.all, gradients.all):
            if whole is None or part is None:
                continue
            if not own:
                whole.tensor.addcmul_(part.tensor, _or_one(part.pending, part.tensor))
            elif part.pending is None:
                whole.tensor[:, position].copy_(part.tensor)
            else:  # in torch, as the place has strides
                out = whole.tensor[:, position]
                scale_into(out, part.tensor, part.pending, "torch", spent=True)


def _or_one(factor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_ones(()) if factor is None else factor
