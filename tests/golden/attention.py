"""Make the attention call of one row of tests/golden/calls.py.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features of queries and keys, E
of values.
"""

from typing import Any

import torch
from torch import Tensor

import lowtide
from lowtide import attn_bias
from tests.golden.given import F32, Function, Given, Make


def attention(
    B: int,
    M: int,
    H: int,
    K: int,
    dtype: torch.dtype = F32,
    *,
    N: int | None = None,
    G: int | None = None,
    E: int | None = None,
    mask: attn_bias.AttentionBias | None = None,
    bias: tuple[int, ...] | None = None,
    visible: tuple[int, ...] | None = None,
    logsumexp: bool = False,
    **options: Any,
) -> Make:
    """Return a maker of a call; bias is the shape of a trained bias, visible of a bool mask."""
    N, G, E = N or M, G or H, E or K
    function_of = (
        lowtide.memory_efficient_attention_with_lse if logsumexp else lowtide.memory_efficient_attention
    )

    def make(given: Given) -> Function:
        for name, shape in {"query": (B, M, H, K), "key": (B, N, G, K), "value": (B, N, G, E)}.items():
            given.leaf(name, *shape, dtype=dtype)
        if bias is not None:
            given.leaf("bias", *bias, dtype=dtype)
        seen = None if visible is None else given.bools(*visible)

        def function(query: Tensor, key: Tensor, value: Tensor, trained: Tensor | None = None) -> Any:
            of_scores = mask if trained is None else trained if mask is None else mask.add_bias(trained)
            return function_of(query, key, value, of_scores if seen is None else seen, **options)

        return function

    return make


def torchs_attention(
    leading: tuple[int, ...],
    M: int,
    H: int,
    K: int,
    dtype: torch.dtype = F32,
    *,
    N: int | None = None,
    G: int | None = None,
    attn_mask: tuple[int, ...] | None = None,
    visible: tuple[int, ...] | None = None,
    **options: Any,
) -> Make:
    """Return a maker of a call of torch's own; the shapes are of a trained and of a bool mask."""
    N, G = N or M, G or H

    def make(given: Given) -> Function:
        given.leaf("query", *leading, H, M, K, dtype=dtype)
        given.leaf("key", *leading, G, N, K, dtype=dtype)
        given.leaf("value", *leading, G, N, K, dtype=dtype)
        if attn_mask is not None:
            given.leaf("attn_mask", *attn_mask, dtype=dtype)
        seen = None if visible is None else given.bools(*visible)

        def function(query: Tensor, key: Tensor, value: Tensor, trained: Tensor | None = None) -> Tensor:
            return lowtide.scaled_dot_product_attention(
                query, key, value, trained if seen is None else seen, **options
            )

        return function

    return make


def merged_attention(B: int, M: int, H: int, K: int) -> Make:
    def make(given: Given) -> Function:
        for name in ("query", "key", "value"):
            given.leaf(name, B, M, H, K)

        def function(query: Tensor, key: Tensor, value: Tensor) -> Any:
            parts = [
                lowtide.memory_efficient_attention_with_lse(query, key[:, keys], value[:, keys])
                for keys in (slice(0, M // 3), slice(M // 3, M))
            ]
            return lowtide.merge_attentions(parts)

        return function

    return make
