"""Compute the loss and its gradients by the definition: errors are relative to these.

Legend: N tokens, D features, V classes, C tokens in a chunk.
"""

import torch
from torch import Tensor

from lowtide.tools.bench.cases import IGNORE_INDEX, Mode

TRUTH_CHUNK = 1024
MOST_FLOAT64_FLOPS = 1 << 46  # About a second and a half on a card with full float64 speed.
MOST_FLOAT64_WEIGHTS = 1 << 31  # With their gradient they take 32 GiB.


@torch.no_grad()
def exact(
    input_ND: Tensor, weight_VD: Tensor, target_N: Tensor, mode: Mode, softcap: float | None = None
) -> tuple[Tensor, ...]:
    """Return (loss, dX, dW), or the loss alone, by chunks in `truth_dtype`."""
    V, D = weight_VD.shape
    wide = truth_dtype(len(input_ND), D, V, input_ND.dtype)
    wide_VD = weight_VD.to(wide)
    counted = (target_N != IGNORE_INDEX).sum()
    loss = torch.zeros((), dtype=torch.float64, device=input_ND.device)
    grads_ND, grad_VD = [], torch.zeros_like(wide_VD)
    for x_CD, target_C in zip(input_ND.split(TRUTH_CHUNK), target_N.split(TRUTH_CHUNK)):
        wide_CD = x_CD.to(wide)
        logits_CV = wide_CD @ wide_VD.T
        slope_CV = None
        if softcap is not None:
            logits_CV.div_(softcap).tanh_()
            slope_CV = 1 - logits_CV.square()
            logits_CV.mul_(softcap)
        keep_C1 = (target_C != IGNORE_INDEX)[:, None]
        target_C1 = target_C.clamp_min(0)[:, None]
        logits_CV -= logits_CV.logsumexp(1, keepdim=True)
        loss -= (logits_CV.gather(1, target_C1) * keep_C1).sum(dtype=torch.float64)
        if mode is Mode.FORWARD:
            continue
        grad_CV = logits_CV.exp_()
        grad_CV.scatter_add_(1, target_C1, grad_CV.new_full((), -1.0).expand_as(target_C1))
        grad_CV.mul_(keep_C1.to(wide) / counted)
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        grads_ND.append(grad_CV @ wide_VD)
        grad_VD.addmm_(grad_CV.T, wide_CD)
    if mode is Mode.FORWARD:
        return (loss / counted,)
    return loss / counted, torch.cat(grads_ND), grad_VD


def truth_dtype(tokens: int, features: int, classes: int, dtype: torch.dtype) -> torch.dtype:
    """Return float64, or float32 for half precision that would take too much time or memory."""
    flops, weights = 6 * tokens * features * classes, features * classes
    too_much = flops > MOST_FLOAT64_FLOPS or weights > MOST_FLOAT64_WEIGHTS
    return torch.float32 if dtype.itemsize == 2 and too_much else torch.float64


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the relative error by Frobenius norms."""
    return (torch.linalg.vector_norm(got.to(want.dtype) - want) / torch.linalg.vector_norm(want)).item()
