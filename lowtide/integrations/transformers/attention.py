"""lowtide's attention for models of Transformers: `attn_implementation="lowtide"`.

Shapes: B sequences; H query heads, G key heads; M queries, N keys; K features, E of values.
"""

import copy
import inspect
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from lowtide.core.errors import ArgumentError
from lowtide.integrations.transformers.masks import DenseMask, PackedMask, mask
from lowtide.ops.attention import memory_efficient_attention, memory_efficient_attention_with_lse
from lowtide.ops.attention.definition.masks import AttentionBias, Band, LowerTriangularMask

NAME = "lowtide"
HIDDEN = 1e4  # decision 0028
"""As a score below any other, e^-HIDDEN is 0; and a sum of such scores still has digits."""
SPARSE = "it sees all keys that the mask shows; use attn_implementation='eager' for a choice of them"
REFUSED = {
    "output_attentions": "it never has the attention weights; use attn_implementation='eager' for these",
    "indices": SPARSE,
    "block_indices": SPARSE,
    "cache": "it does not read a paged cache (continuous batching); use generate()",
}


def register_attention() -> None:
    """Registers :func:`lowtide.memory_efficient_attention` as "lowtide" with Transformers' AttentionInterface
    and its masks with the AttentionMaskInterface (without which no mask is built, and results are wrong).

    Then ``from_pretrained(..., attn_implementation="lowtide")`` or, for a model that is there already,
    ``model.set_attn_implementation("lowtide")``. To call this again changes nothing.

    Logits and gradients are those of "eager", for any model whose attention goes through the interface:
    grouped key heads, soft cap, sliding window, sinks, position bias (and its gradient), padding, a cache
    and `generate`, several sequences in a row. Dropout has the same rate and drops other scores. A query
    that sees no key, as in padding on the left, gets 0, where "eager" averages over all values
    (beside a position bias: an average over hidden keys).

    Memory: O(M). The scores never exist; a mask is a few numbers, padding [B, 1, 1, N]. docs/transformers.md
    says what else is made when; a mask of [B, 1, M, N] never without a :class:`DenseMaskWarning`, unless the
    caller has passed one. A position bias has the size that the model gives it.

    Raises:
        ImportError: for versions of Transformers that make masks of other arguments (before `q_length`).
        ValueError: when the model runs, with `output_attentions=True`, with a paged cache, and for a few
            models that choose keys (sparse attention), compute with their mask, or add keys to what it has.

    Example::

        register_attention()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="lowtide")
    """
    if "q_length" not in inspect.signature(sdpa_mask).parameters:
        raise ImportError(
            f"register_attention knows no masks of transformers {transformers.__version__}; upgrade it"
        )
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: nn.Module,
    query: Tensor,  # [B, H, M, K]
    key: Tensor,  # [B, G, N, K]
    value: Tensor,  # [B, G, N, E]
    attention_mask: AttentionBias | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,  # [1 or B, H, M, N]
    s_aux: Tensor | None = None,  # [H]
    sinks: Tensor | None = None,  # [B, H, M, 1]
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # [B, M, H, E]
    """What a model's layer calls. A sink (s_aux of each head, or sinks of each query) is a score that has no
    value: the result is out * sigmoid(lse - sink)."""
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ArgumentError(f"attn_implementation='lowtide' cannot take {name}: {reason}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None and query.shape[2] > 1:  # of a model that makes none: as in "sdpa"
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        attention_mask = LowerTriangularMask() if causal else None
    if isinstance(attention_mask, DenseMask):
        attention_mask.check(query.shape[2], key.shape[2])
        attention_mask = attention_mask.bias
    if position_bias is not None:
        if softcap is not None:
            raise ArgumentError(
                "attn_implementation='lowtide' cannot take a soft cap beside a position bias; use 'eager'"
            )
        query, key, attention_mask = _biased(query, key, attention_mask, position_bias, scaling)
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    packed = isinstance(attention_mask, PackedMask)
    if packed:
        q, k, v = (each.flatten(0, 1)[None] for each in (q, k, v))
    elif isinstance(attention_mask, AttentionBias) and attention_mask.band == Band():
        attention_mask.check(query.shape[2], key.shape[2])
        attention_mask = attention_mask.bias  # no mask at all, for the fastest way
    drop = dropout if module.training else 0.0
    if s_aux is not None:
        sinks = s_aux[:, None, None]
    if sinks is None:
        out = memory_efficient_attention(q, k, v, attention_mask, drop, scaling, softcap=softcap)
    else:
        out, lse_BHM = memory_efficient_attention_with_lse(
            q, k, v, attention_mask, drop, scaling, softcap=softcap
        )
        sinks_BHM = sinks[..., 0]
        if packed:  # as the rows are: one after the other
            sinks_BHM = sinks_BHM.expand(query.shape[:-1]).transpose(0, 1).flatten(1)[None]
        share_BHM = torch.sigmoid(lse_BHM - sinks_BHM)
        out = (out * share_BHM.transpose(1, 2)[..., None]).to(out.dtype)
    if packed:
        out = out[0].unflatten(0, (query.shape[0], -1))
    return out.contiguous(), None


def _biased(
    query: Tensor, key: Tensor, mask: AttentionBias | Tensor | None, bias: Tensor, scaling: float
) -> tuple[Tensor, Tensor, AttentionBias | Tensor]:
    """The bias put on the mask. If that has padding, [B, 1, 1, N], this becomes one feature more: 1 in each
    query, and in a key that is hidden so low that its score vanishes. One tensor of both would have all of
    [B, H, M, N]."""
    if mask is None:
        return query, key, bias
    if isinstance(mask, Tensor):
        bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
        return query, key, bias
    if isinstance(mask, PackedMask) and query.shape[0] > 1:
        raise ArgumentError(
            "attn_implementation='lowtide' cannot take a position bias beside several sequences in each of "
            f"{query.shape[0]} rows; put all of them into one row"
        )
    if mask.bias is not None:
        seen_BGN1 = mask.bias.movedim(-1, -2).to(key.device).expand(*key.shape[:-1], 1)
        low = max(-HIDDEN / scaling, torch.finfo(key.dtype).min)
        key = torch.cat([key, torch.zeros_like(seen_BGN1, dtype=key.dtype).masked_fill(~seen_BGN1, low)], -1)
        query = torch.cat([query, torch.ones_like(query[..., :1])], -1)
    biased = copy.copy(mask)
    biased.bias = bias
    return query, key, biased
