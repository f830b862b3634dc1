"""Compute products of half-precision operands, as eager torch differentiates them on a card.

Shapes: N tokens, D features, V classes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_multiplies_halves = ContextVar("_multiplies_halves", default=False)


@contextmanager
def half_products(used: bool = True) -> Iterator[None]:
    """Let eager torch round the logits' gradient on a CPU too, as the engine under test does."""
    token = _multiplies_halves.set(used)
    try:
        yield
    finally:
        _multiplies_halves.reset(token)


def multiplies_halves() -> bool:
    """Return True within `half_products`."""
    return _multiplies_halves.get()


class WideLinear(torch.autograd.Function):
    """F.linear of half-precision operands, in float32; gradients are half-precision products."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_ND, weight_VD, bias_V)
        if x_ND.is_cuda:
            logits_NV = torch.mm(x_ND, weight_VD.t(), out_dtype=torch.float32)
        else:
            logits_NV = x_ND.float() @ weight_VD.float().t()
        return logits_NV if bias_V is None else logits_NV + bias_V.float()

    @staticmethod
    def backward(ctx: Any, grad_NV: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_ND, weight_VD, bias_V = ctx.saved_tensors
        grad_NV = grad_NV.to(x_ND.dtype)
        grad_bias_V = None if bias_V is None else grad_NV.sum(0)
        return grad_NV @ weight_VD, grad_NV.t() @ x_ND, grad_bias_V
