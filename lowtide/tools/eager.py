"""Compute losses and attention with all logits and scores: what every tool compares with.

Legend: N tokens, V classes; B batches, H query heads, G key heads, M queries, N keys, K features of
keys, E of values.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def eager_loss(
    input: Tensor, weight_VD: Tensor, target: Tensor, reduction: str = "mean", softcap: float | None = None
) -> Tensor:
    """Return the cross-entropy of [..., D] hidden states, as Transformers computes it.

    Logits, and their soft cap, are in the dtype of the product, the loss in float32 at least.
    """
    logits = F.linear(input, weight_VD)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    return F.cross_entropy(_at_least_float32(logits.flatten(0, -2)), target.flatten(), reduction=reduction)


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
    are in the dtype of the product, log-probabilities and the loss in float32 at least.
    """
    heads = (student_ND, student_VD), (teacher_ND, teacher_VD)
    s_NV, t_NV = (_at_least_float32(F.linear(*head)).log_softmax(-1) for head in heads)
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


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    hidden: Tensor | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return attention [B, M, H, E], with all scores in the dtype of the inputs.

    These are query [B, M, H, K], key [B, N, G, K], value [B, N, G, E], bias and sink [H]. `bias`
    and `hidden`, which is True where a query does not see a key, broadcast to [B, H, M, N].
    """
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    heads_of_a_key = query.shape[1] // key.shape[1]
    if heads_of_a_key > 1:
        key, value = (each.repeat_interleave(heads_of_a_key, 1) for each in (key, value))
    score_BHMN = query @ key.mT * query.shape[-1] ** -0.5
    if softcap:
        score_BHMN = softcap * torch.tanh(score_BHMN / softcap)
    if bias is not None:
        score_BHMN = score_BHMN + bias
    if hidden is not None:
        score_BHMN = score_BHMN.masked_fill(hidden, -torch.inf)
    if sink is not None:
        sink_BHM1 = sink[:, None, None].expand(*score_BHMN.shape[:-1], 1)
        score_BHMN = torch.cat((score_BHMN, sink_BHM1), -1)
    weight_BHMN = F.dropout(score_BHMN.softmax(-1)[..., : key.shape[2]], dropout)
    return (weight_BHMN @ value).transpose(1, 2)


def _at_least_float32(tensor: Tensor) -> Tensor:
    """Return the tensor in float32, or in float64 if that is its dtype."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
