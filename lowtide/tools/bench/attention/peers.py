"""Call the packages for attention that are installed beside torch.

Legend: B batches, H query heads, G key heads, M queries, N keys, K features of keys, E of values.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.tools.bench.attention.cases import Attention, AttentionCase, Inputs
from lowtide.tools.bench.attention.torch_kernels import packed, refuse
from lowtide.tools.bench.providers import Unavailable, cuda_module


def xformers(case: AttentionCase) -> Attention:
    ops = cuda_module("xformers.ops", case.device)
    if case.key_heads != case.H:
        raise Unavailable("it takes other shapes where query heads share a key head")
    refuse(case, a_soft_cap=case.softcap, sinks=case.sinks, a_window=case.window)
    kinds = ops.fmha.attn_bias
    mask: Any = None
    if case.lengths:
        kind = kinds.BlockDiagonalCausalMask if case.causal else kinds.BlockDiagonalMask
        mask = kind.from_seqlens(list(case.lengths))
    elif case.causal:
        same = case.keys == case.M
        mask = ops.LowerTriangularMask() if same else kinds.LowerTriangularFromBottomRightMask()
    keep = case.keep()
    if mask is not None and (case.bias or case.padded):
        raise Unavailable("not taken: a tensor beside a mask, with its gradient")
    whole = (case.B, case.H, case.M, case.keys)

    def run(inputs: Inputs) -> Tensor:
        query, key, value, bias, *_ = inputs
        given = mask
        if keep is not None:
            of = torch.zeros((), dtype=case.dtype, device=case.device) if bias is None else bias
            given = of.masked_fill(~keep, -torch.inf).expand(whole)
        elif bias is not None:
            given = bias.expand(whole)
        return ops.memory_efficient_attention(query, key, value, given, case.dropout)  # type: ignore[no-any-return]

    return run


def flash_attn(case: AttentionCase) -> Attention:
    module = cuda_module("flash_attn", case.device)
    if case.dtype.itemsize != 2:
        raise Unavailable("it takes half precision alone")
    refuse(case, a_bias=case.bias, padded_keys=case.padded, sinks=case.sinks)
    options = {
        "dropout_p": case.dropout,
        "causal": case.causal,
        "window_size": case.window or (-1, -1),
        "softcap": case.softcap or 0.0,
    }
    if not case.lengths:
        return lambda inputs: module.flash_attn_func(*inputs[:3], **options)  # type: ignore[no-any-return]
    return packed(module.flash_attn_varlen_func, case, options)
