"""Attention with all scores, as it is defined, to compare with: `attn_implementation="exactly"`."""

import torch
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils


def register_exactly():
    AttentionInterface.register("exactly", exactly)
    AttentionMaskInterface.register("exactly", dense_mask)


def exactly(
    module,
    query,
    key,
    value,
    attention_mask,
    scaling=None,
    softcap=None,
    position_bias=None,
    s_aux=None,
    sinks=None,
    **_,
):
    """The definition with all scores: models' "eager" has float32 and its smallest number."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeat, 1) for each in (key, value))
    z_BHMN = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        z_BHMN = softcap * torch.tanh(z_BHMN / softcap)
    if position_bias is not None:
        z_BHMN = z_BHMN + position_bias
    if attention_mask is not None:
        z_BHMN = z_BHMN.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux[:, None, None].expand(*z_BHMN.shape[:-1], 1)
    all_scores = z_BHMN if sinks is None else torch.cat([z_BHMN, sinks], -1)
    weight_BHMN = all_scores.softmax(-1)[..., : z_BHMN.shape[-1]].nan_to_num(0)
    return (weight_BHMN @ value).transpose(1, 2), None


def dense_mask(**options):
    return masking_utils.sdpa_mask(**options | {"allow_is_causal_skip": False})
