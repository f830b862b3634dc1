"""Compute attention by its definition, with all scores at once.

The definition runs in any dtype, on any device, and has derivatives of any order.

Shapes: B batches, H query heads, G key heads, M queries, N keys, K features, E of values.
"""

import torch
from torch import Tensor

from lowtide.core.autodiff import without_autocast
from lowtide.ops.attention.definition.dropout import column_keys, keep_mask, rescale, row_keys
from lowtide.ops.attention.definition.intervals import Intervals, visible
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, sizes


def attention(operands: Operands, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """Return the result [B, H, M, E] and the logsumexp of each row, [B, H, M]."""
    query, key, value, bias, first, end, seed = operands
    B, H, _, M, N, _, _ = sizes(operands)
    shown_MN = None if first is None or end is None else visible(Intervals(first, end), N)
    keep_BHMN = None
    if seed is not None:
        keep_BHMN = keep_mask(row_keys(seed, B, H, M)[..., None], column_keys(seed, N), options.dropout)
    dtype = operands.sum_dtype
    wide = Operands(query.to(dtype), key.to(dtype), value.to(dtype), bias)
    out, logsumexp = attend(wide, shown_MN, keep_BHMN, options)
    return out.to(query.dtype), logsumexp


def attend(
    operands: Operands, shown_MN: Tensor | None, keep_BHMN: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return result and logsumexp for operands in the sums' dtype.

    shown_MN is True where query i sees key j, keep_BHMN where dropout keeps the score; None stands
    for True everywhere.
    """
    query, key, value, bias = operands.differentiable
    size = sizes(operands)
    B, H, G, M, N, K, E = size
    rows = size.R * M
    with without_autocast(operands.device):
        # Query heads that share a key head are rows of one product, so that keys are not repeated.
        z_BHMN = (query.reshape(B, G, rows, K) @ key.mT).reshape(B, H, M, N) * options.scale
        if options.softcap:
            z_BHMN = options.softcap * torch.tanh(z_BHMN / options.softcap)
        if bias is not None and bias.dtype == torch.bool:
            z_BHMN = z_BHMN.masked_fill(~bias, -torch.inf)
        elif bias is not None:
            z_BHMN = z_BHMN + bias.to(z_BHMN.dtype)
        if shown_MN is not None:
            z_BHMN = z_BHMN.masked_fill(~shown_MN, -torch.inf)
        # The maximum of a row that sees no key is clamped to a finite number. Then the row's sum
        # and its result are 0, and not NaN.
        lowest = torch.finfo(z_BHMN.dtype).min
        max_BHM1 = z_BHMN.detach().amax(-1, keepdim=True) if N else z_BHMN.new_zeros(B, H, M, 1)
        max_BHM1 = max_BHM1.clamp(min=lowest)
        weight_BHMN = torch.exp(z_BHMN - max_BHM1)
        sum_BHM1 = weight_BHMN.sum(-1, keepdim=True)
        nothing_BHM1 = sum_BHM1 == 0
        sum_BHM1 = sum_BHM1.masked_fill(nothing_BHM1, 1)
        logsumexp_BHM1 = (max_BHM1 + sum_BHM1.log()).masked_fill(nothing_BHM1, -torch.inf)
        weight_BHMN = weight_BHMN / sum_BHM1
        if keep_BHMN is not None:
            weight_BHMN = weight_BHMN * keep_BHMN * rescale(options.dropout)
        out_BHME = (weight_BHMN.reshape(B, G, rows, N) @ value).reshape(B, H, M, E)
    return out_BHME, logsumexp_BHM1[..., 0]
