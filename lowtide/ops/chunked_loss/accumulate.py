"""Add up terms over chunks, and keep float16 gradients in their range.

Sums are float32 where the terms are half precision. A float16 gradient that is formed before the
loss is scaled loses what is below 6e-8. So a chunk's backward starts not from 1 but from a power of
two, `backward_scale`. It brings the largest gradient of the head's output near 2^3, as a loss scale
does for a mean. Gradients are divided by it when the upstream gradient is known.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.checks import HALVES
from lowtide.core.kernels.devices import frexp
from lowtide.core.pending_gradient import PendingGradient

EXPONENT = 3
BEYOND = 2.0**20  # stands for infinity: the largest of a gradient that float16 cannot hold


class Sum:
    """Hold the sum of the terms added so far, without references to them."""

    def __init__(self) -> None:
        self.total: Any = None

    def add(self, term: Any) -> None:
        """Add a tensor or a number."""
        wide = sum_dtype(term.dtype) if isinstance(term, Tensor) else None
        if self.total is None:
            self.total = term if wide is None else term.to(wide, copy=True)
        elif isinstance(self.total, Tensor) and wide and torch.can_cast(wide, self.total.dtype):
            self._add_in_place(term)
        else:  # a number, or a tensor that the sum's dtype or shape has no room for
            self.total = self.total + (term if wide is None else term.to(wide))

    def _add_in_place(self, term: Tensor) -> None:
        if term.is_cuda or term.dtype == self.total.dtype or not term.dim():
            self.total.add_(term)
            return
        # The CPU would convert the whole term at once.
        rows = max(1, len(term) * 2**16 // max(1, term.numel()))
        for total_rows, term_rows in zip(self.total.split(rows), term.split(rows)):
            total_rows.add_(term_rows)

    def add_product(self, g_CV: Tensor, x_CD: Tensor) -> None:
        """Add g_CV^T x_CD, a float32 product for half precision."""
        wide = sum_dtype(g_CV.dtype)
        widen = {} if wide == g_CV.dtype else {"out_dtype": wide}
        if not len(g_CV):  # without rows cuBLAS writes nothing, instead of zeros
            self.add(torch.zeros(g_CV.shape[1], x_CD.shape[1], dtype=wide, device=g_CV.device))
        elif self.total is None:
            self.total = torch.mm(g_CV.t(), x_CD, **widen)
        elif self.total.dtype == wide:
            torch.addmm(self.total, g_CV.t(), x_CD, out=self.total, **widen)
        else:
            self.add(torch.mm(g_CV.t(), x_CD, **widen))


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which terms of this dtype are summed."""
    if dtype in HALVES:
        return torch.float32
    return dtype if dtype.is_floating_point or dtype.is_complex else torch.int64


def backward_scale(gradients: Sequence[Tensor], previous: Tensor, limit: int) -> Tensor:
    """Return the power of two that a chunk's backward starts from, at most 2^limit.

    It follows from the gradients of the head's output. Where they are all zero, or too small to be
    told from zero, it is the previous chunk's.
    """
    sizes = [each.detach().abs().amax().float() for each in gradients if each.numel()]
    if not sizes:
        return previous
    largest = torch.stack(sizes).amax()
    _, exponent = frexp(largest.clamp(max=BEYOND))
    measured = torch.ldexp(torch.ones_like(largest), (EXPONENT - exponent).clamp(-limit, limit))
    return torch.where(largest > 0, measured, previous)


def held_scale(gradients: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Return the scale if the gradients that start from it are finite, and at most 1 if not.

    A gradient within the loss may be far larger than that of the head's output: a small factor on
    the logits makes it so. float16 then overflows there, where the output's gradient cannot tell.
    """
    if not gradients:
        return scale
    finite = torch.stack([each.detach().isfinite().all() for each in gradients]).all()
    return torch.where(finite, scale, scale.clamp(max=1))


def rounded(total: Tensor, dtype: torch.dtype, last_scale: Tensor | None) -> PendingGradient:
    """Return a finished sum in the dtype of its parameter, and the factor that is left."""
    if last_scale is None:
        return PendingGradient(total if total.dtype == dtype else total.to(dtype))
    if dtype not in HALVES:
        return PendingGradient(total, remaining=1 / last_scale)
    # Any power of two will do within float16's range; this one brings the largest element near 1.
    _, exponent = frexp(total.abs().amax() if total.numel() else total.new_zeros(()))
    center = torch.ldexp(torch.ones_like(last_scale), -exponent.clamp(-100, 100))
    return PendingGradient(total.mul_(center).to(dtype), remaining=1 / (last_scale * center))
