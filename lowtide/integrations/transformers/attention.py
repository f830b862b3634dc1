"""Provide lowtide's attention to models of Transformers: `attn_implementation="lowtide"`.

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
from lowtide.ops.attention.definition.intervals import Band
from lowtide.ops.attention.definition.masks import AttentionBias, LowerTriangularMask

NAME = "lowtide"
HIDDEN = 1e4  # decision 0028
"""Lowers a hidden key's score: e^-HIDDEN is 0, and the lowered score keeps enough digits."""
SPARSE = "it sees all keys that the mask shows; use attn_implementation='eager' for a choice of them"
REFUSED = {
    "output_attentions": "it never has the attention weights; use attn_implementation='eager' for these",
    "indices": SPARSE,
    "block_indices": SPARSE,
    "cache": "it does not read a paged cache (continuous batching); use generate()",
}


def register_attention() -> None:
    """Register lowtide's attention as "lowtide" with Transformers.

    :func:`lowtide.memory_efficient_attention` is registered with the AttentionInterface, and its
    masks with the AttentionMaskInterface. Without the latter Transformers would build no mask, and
    results would be wrong.

    Afterwards pass ``attn_implementation="lowtide"`` to ``from_pretrained``, or call
    ``model.set_attn_implementation("lowtide")`` on an existing model. A second call changes
    nothing.

    Logits and gradients equal those of "eager", for any model whose attention uses the interface:
    grouped key heads, soft cap, sliding window, sinks, position bias (and its gradient), padding, a
    cache and `generate`, several sequences in a row. Dropout has the same rate and drops other
    scores. A query that sees no key, as in padding on the left, gets 0; "eager" averages over all
    values. Beside a position bias such a query gets an average over hidden keys.

    Memory: O(M). The scores never exist. A mask is a few numbers, padding is [B, 1, 1, N]; the page
    "Transformers, model by model" of the documentation lists what else is allocated and when. A
    mask of [B, 1, M, N] always gives a :class:`DenseMaskWarning`, unless the caller has passed one.
    A position bias has the size that the model gives it.

    Raises:
        ImportError: for versions of Transformers whose masks take other arguments (before
            `q_length`).
        ValueError: when the model runs, with `output_attentions=True`, with a paged cache, and for
            a few models that choose keys (sparse attention), compute with their mask, or add keys
            that are not in the mask.

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
    """Compute the attention of a model's layer, with Transformers' arguments.

    A sink (s_aux of each head, or sinks of each query) is a score without a value: the result is
    out * sigmoid(lse - sink).
    """
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise ArgumentError(f"attn_implementation='lowtide' cannot take {name}: {reason}")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    # Where the model makes no mask, choose one as "sdpa" does.
    if attention_mask is None and query.shape[2] > 1:
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
        attention_mask = attention_mask.bias  # Without a mask the call can take the fastest kernel.
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
        if packed:  # The rows of the batch are one sequence here, so their sinks must be, too.
            sinks_BHM = sinks_BHM.expand(query.shape[:-1]).transpose(0, 1).flatten(1)[None]
        share_BHM = torch.sigmoid(lse_BHM - sinks_BHM)
        out = (out * share_BHM.transpose(1, 2)[..., None]).to(out.dtype)
    if packed:
        out = out[0].unflatten(0, (query.shape[0], -1))
    return out.contiguous(), None


def _biased(
    query: Tensor, key: Tensor, mask: AttentionBias | Tensor | None, bias: Tensor, scaling: float
) -> tuple[Tensor, Tensor, AttentionBias | Tensor]:
    """Return query and key, and the mask with the bias added.

    Padding of the mask, [B, 1, 1, N], becomes one more feature. This feature is 1 in each query,
    and so low in a hidden key that the key's score vanishes. One tensor of bias and padding would
    take all of [B, H, M, N].
    """
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
