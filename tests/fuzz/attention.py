"""Attention: every signature, layout, mask, bias, option, dtype and backend, against float64.

Shapes: B batches, M queries, N keys, H query heads, G key heads, K features, E of values.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import lowtide
from tests.fuzz.attention_inputs import draw_case
from tests.fuzz.calls import check
from tests.fuzz.compare import References, compare, is_argument_error, mapped, measured, widened
from tests.fuzz.draw import Draw
from tests.fuzz.ways import pick_way, second_order
from tests.ops.attention.helpers import Case, dense, differentiate, references, shown
from tests.support.budgets import HALVES

SIGNATURES = ("lse", "lse", "plain", "torch", "torch", "three", "five")


def case(draw: Draw) -> Callable[[], None]:
    signature, dtype = draw.pick("signature", SIGNATURES), draw.dtype()
    made, tiny = draw_case(draw, signature, dtype)
    backend = "auto"
    if signature != "torch":
        cuda = draw.device == "cuda"
        choices = ["auto", "auto", "auto", "torch", "sdpa", *(["triton"] * cuda)]
        # The interpreter rounds to bfloat16 towards 0.
        kernels = tiny and (cuda or dtype != torch.bfloat16) and draw.chance(0.5)
        backend = draw.pick("backend", ["triton"] if kernels else choices)
    way, leaves = pick_way(draw), made.leaves()
    B, M, H, _ = made.query.shape
    upstream: dict[str, Tensor | None] = {"out": draw.normal((B, M, H, made.value.shape[-1]), torch.float32)}
    if signature == "lse":
        seen_BHM = shown(made).any(-1).expand(B, H, M)
        of_lse = draw.normal((B, H, M), torch.float32) * seen_BHM
        upstream |= {"logsumexp": of_lse} if draw.pick("of_lse", (True, True, False)) else {}
    pair = (upstream["out"], upstream.get("logsumexp"))
    dtypes = {name: leaf.dtype for name, leaf in leaves.items()}
    dtypes |= {"out": dtype, "logsumexp": made.sum_dtype}

    def function(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        return call(replace(made, **leaves), signature, backend)

    def densely(convert: Callable[[Tensor], Tensor]) -> Any:
        return differentiate(dense, mapped(made, convert), pair)

    def run() -> None:
        rounded = made if made.bias is None else replace(made, bias=_like(made.bias, dtype))
        _, eager, magnitude = references(rounded, pair)
        exact = differentiate(dense, made.to(torch.float64), pair)
        refs = _parts(widened(References(exact, eager, magnitude), densely), signature)
        # The output is rounded to it before a bias of more digits has its gradient.
        rounding = torch.finfo(dtype).eps if dtype in HALVES else 0.0
        try:
            check(function, leaves, upstream, way, refs, dtypes, made.sum_dtype, rounding=rounding)
        except Exception as error:
            if not (is_argument_error(error) and backend in ("sdpa", "triton")):
                raise

    def twice() -> None:
        def dense_twice(convert: Callable[[Tensor], Tensor]) -> Any:
            own = mapped(made, convert)
            both = lambda part: dict(zip(("out", "logsumexp"), dense(replace(own, **part))))  # noqa: E731
            return second_order(both, own.leaves(), upstream)

        compare(
            second_order(function, leaves, upstream),
            measured(dense_twice, dtype, cancels=True),
            dtypes,
            made.sum_dtype,
        )

    if tiny and backend == "auto" and dtype in (torch.float32, torch.float64):
        draw.note("second-order")
        return twice
    return run


def _parts(refs: References, signature: str) -> References:
    if signature == "lse":
        return refs
    return References(*({name: part for name, part in each.items() if name != "logsumexp"} for each in refs))


def _like(bias: Tensor, dtype: torch.dtype) -> Tensor:
    return bias if bias.dtype == torch.bool else bias.detach().to(dtype).requires_grad_(bias.requires_grad)


def call(made: Case, signature: str, backend: str) -> dict[str, Tensor]:
    """The results in the layouts of tests/ops/attention/helpers.py, [B, M, H, E] and [B, H, M]."""
    query, key, value = made.query, made.key, made.value
    if signature == "torch":
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        out = lowtide.scaled_dot_product_attention(
            *(query, key, value, made.bias),
            is_causal=made.mask is not None,
            scale=made.options.get("scale"),
            enable_gqa=key.shape[1] != query.shape[1],
        )
        return {"out": out.transpose(1, 2)}
    options = made.options | {"backend": backend}
    if signature == "three":
        query, key, value = (each.squeeze(2) for each in (query, key, value))
        return {
            "out": lowtide.memory_efficient_attention(query, key, value, made.attn_bias, **options)[
                :, :, None
            ]
        }
    if signature == "five":
        G = key.shape[2]
        query, key, value = query.unflatten(2, (G, -1)), key.unsqueeze(3), value.unsqueeze(3)
        out = lowtide.memory_efficient_attention(query, key, value, made.attn_bias, **options)
        return {"out": out.flatten(2, 3)}
    if signature == "plain":
        return {"out": lowtide.memory_efficient_attention(query, key, value, made.attn_bias, **options)}
    found = lowtide.memory_efficient_attention_with_lse(query, key, value, made.attn_bias, **options)
    return dict(zip(("out", "logsumexp"), found))
