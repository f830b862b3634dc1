"""Compute the loss as most training code does, with all logits: what every tool compares with."""

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_loss(
    input: Tensor, weight_VD: Tensor, target: Tensor, reduction: str = "mean", softcap: float | None = None
) -> Tensor:
    """Return the cross-entropy of [..., D] hidden states, as Transformers computes it.

    Logits, and their soft cap, are in the dtype of the product, the loss in float32.
    """
    logits = F.linear(input, weight_VD)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(logits.flatten(0, -2).float(), target.flatten(), reduction=reduction)
