"""Compute the loss and its gradients by the definition: errors are relative to these.

Legend: N tokens, D features, V classes, C tokens in a chunk.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lowtide.tools.bench.cases import IGNORE_INDEX, Mode
from lowtide.tools.eager import eager_loss

TRUTH_CHUNK = 1024
MOST_FLOAT64_FLOPS = 1 << 46  # About a second and a half on a card with full float64 speed.
MOST_FLOAT64_WEIGHTS = 1 << 31  # With their gradient and that of a chunk they take 48 GiB.


def exact(
    input_ND: Tensor, weight_VD: Tensor, target_N: Tensor, mode: Mode, softcap: float | None = None
) -> tuple[Tensor, ...]:
    """Return (loss, dX, dW), or the loss alone, by chunks in `truth_dtype`."""
    losses = partial(eager_loss, reduction="none", softcap=softcap)
    return exact_mean(losses, input_ND, weight_VD, target_N, needs_grad=mode is Mode.STEP)


def exact_mean(
    losses: Callable[..., Tensor],
    input_ND: Tensor,
    weight_VD: Tensor,
    target_N: Tensor,
    *rows: Tensor,
    needs_grad: bool = True,
) -> tuple[Tensor, ...]:
    """Return the mean over targets that count, with its gradients of input and weight if needed.

    `losses` returns the loss of each row of a chunk: of input, weight, target and `rows`.
    """
    V, D = weight_VD.shape
    wide = truth_dtype(len(input_ND), D, V, input_ND.dtype)
    w_VD = weight_VD.detach().to(wide).requires_grad_(needs_grad)
    counted_N = target_N != IGNORE_INDEX
    loss, grads_ND = torch.zeros((), dtype=torch.float64, device=input_ND.device), []
    given = (input_ND.detach(), target_N, counted_N, *rows)
    for x_CD, target_C, counted_C, *others in zip(*(each.split(TRUTH_CHUNK) for each in given)):
        wide_CD = x_CD.to(wide).requires_grad_(needs_grad)
        losses_C = losses(wide_CD, w_VD, target_C, *others)
        part = (losses_C * counted_C).sum(dtype=torch.float64) / counted_N.sum()
        loss += part.detach()
        if needs_grad:
            part.backward()
            grads_ND.append(wide_CD.grad)
    return (loss, torch.cat(grads_ND), w_VD.grad) if needs_grad else (loss,)


def truth_dtype(tokens: int, features: int, classes: int, dtype: torch.dtype) -> torch.dtype:
    """Return float64, or float32 for half precision that would take too much time or memory."""
    flops, weights = 6 * tokens * features * classes, features * classes
    too_much = flops > MOST_FLOAT64_FLOPS or weights > MOST_FLOAT64_WEIGHTS
    return torch.float32 if dtype.itemsize == 2 and too_much else torch.float64


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the relative error by Frobenius norms."""
    return (torch.linalg.vector_norm(got.to(want.dtype) - want) / torch.linalg.vector_norm(want)).item()
