"""Collect the gradients of a K-dimensional loss, one position after the other.

All positions share input and scale, so the gradients of these two are sums over positions. Each
position has its own part of the bias gradient. All three are held in float32 (float64 for float64).
Each position also has its own part of the weight gradient, which is rounded once (decision 0051).

Shapes: N tokens, D features, V classes, P positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.core.pending_gradient import PendingGradient, scale_into
from lowtide.ops.linear_cross_entropy.definition.head import Head
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.planning.call import NeedsGrad

# For input, weight, bias and scale: True if each position has a part of its own.
OWN = False, True, True, False
WEIGHT = 1


def kept_dtype(place: int, dtype: torch.dtype, sum_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which the gradient of Head.tensors[place] is kept until backward.

    A float16 gradient would be kept with a power of two still to be applied
    (core/pending_gradient.py), and each position would have another power. So a float16 gradient is
    kept in the sum's dtype.
    """
    return dtype if place == WEIGHT and dtype != torch.float16 else sum_dtype


def widened(head: Head, needs_grad: Sequence[bool], sum_dtype: torch.dtype) -> Head:
    """Return the head, with the input in the sum's dtype if the input gradient is wanted."""
    (input,) = head.inputs
    return head._replace(inputs=(input.to(sum_dtype) if needs_grad[0] else input,))


class PositionGradients:
    """Collect the gradients of a head of several positions."""

    def __init__(self, head: Head, needs_grad: NeedsGrad, sum_dtype: torch.dtype) -> None:
        """Allocate the wanted gradients of `head`, which has all positions."""

        def keep(place: int, like: Tensor | None, grad: bool) -> PendingGradient | None:
            if like is None or not grad:
                return None
            make = torch.empty if OWN[place] else torch.zeros
            dtype = kept_dtype(place, like.dtype, sum_dtype)
            return PendingGradient(make(like.shape, dtype=dtype, device=like.device))

        wants = (*needs_grad.inputs, *needs_grad.weights, needs_grad.bias, needs_grad.scale)
        dx, dw, db, dscale = (keep(*each) for each in zip(range(4), head.tensors, wants))
        self.gradients = Gradients((dx,), (dw,), db, dscale)

    def add(self, position: int, gradients: Gradients) -> None:
        """Add the gradients of one position; their memory may be freed afterwards."""
        for own, whole, part in zip(OWN, self.gradients.all, gradients.all):
            if whole is None or part is None:
                continue
            if not own:
                whole.tensor.addcmul_(part.tensor, _or_one(part.remaining, part.tensor))
            elif part.remaining is None:
                whole.tensor[:, position].copy_(part.tensor)
            else:  # in torch, because Triton's kernel requires contiguous memory
                out = whole.tensor[:, position]
                scale_into(out, part.tensor, part.remaining, "torch", spent=True)


def _or_one(factor: Tensor | None, like: Tensor) -> Tensor:
    return like.new_ones(()) if factor is None else factor
