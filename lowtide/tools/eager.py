"""Compute losses as most training code does, with all logits: what every tool compares with."""

import math
from functools import partial

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


def eager_divergence(
    student_ND: Tensor,
    student_VD: Tensor,
    teacher_ND: Tensor,
    teacher_VD: Tensor,
    beta: float,
    ignored_N: Tensor | None = None,
) -> Tensor:
    """Return the mean divergence of the rows that are not ignored, by torch's kl_div.

    `beta` is 0 for forward KL, 1 for reverse KL, and a number between for Jensen-Shannon. Logits
    are in the dtype of the product, log-probabilities and the loss in float32.
    """
    heads = (student_ND, student_VD), (teacher_ND, teacher_VD)
    s_NV, t_NV = (F.linear(*head).float().log_softmax(-1) for head in heads)
    kl_from = partial(F.kl_div, reduction="none", log_target=True)  # KL(second || first)
    if beta == 0:
        loss_NV = kl_from(s_NV, t_NV)
    elif beta == 1:
        loss_NV = kl_from(t_NV, s_NV)
    else:
        m_NV = torch.logaddexp(s_NV + math.log1p(-beta), t_NV + math.log(beta))
        loss_NV = beta * kl_from(m_NV, t_NV) + (1 - beta) * kl_from(m_NV, s_NV)
    if ignored_N is None:
        return loss_NV.sum() / len(loss_NV)
    return loss_NV.sum(1).masked_fill(ignored_N, 0).sum() / (~ignored_N).sum()
