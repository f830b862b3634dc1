"""List every implementation of attention that is measured: ours, torch's own and the peers'.

`load(case)` imports what the provider needs and returns its function of Inputs, [B, M, H, K]. It
raises `Unavailable` where the provider cannot run by design; any other exception, there or later,
is a failure. Both become a row that gives the reason.

Legend: B batches, H query heads, G key heads, M queries, N keys, K features.
"""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide import attn_bias, memory_efficient_attention
from lowtide.ops.attention.definition.validation import Backend
from lowtide.tools.bench.attention.cases import AttentionCase, Inputs
from lowtide.tools.bench.providers import Unavailable

Attention = Callable[[Inputs], Tensor]
Load = Callable[[AttentionCase], Attention]

SEED = 1


@dataclass(frozen=True)
class AttentionProvider:
    name: str
    distribution: str  # The installed package whose version stands in the provider's rows.
    load: Load
    backend: Backend | None = None  # The backend that one of ours asks for.
    smoke: bool | None = None


def _lowtide(name: str, backend: Backend, *devices: str) -> AttentionProvider:
    return AttentionProvider(name, "lowtide", partial(_own, backend, devices), backend)


def _own(backend: Backend, devices: tuple[str, ...], case: AttentionCase) -> Attention:
    if case.device not in devices:
        raise Unavailable(f"measured on {' and '.join(devices)} alone")
    mask = attn_bias.LowerTriangularMask() if case.causal else None

    def run(inputs: Inputs) -> Tensor:
        query, key, value, bias, _ = inputs
        given = bias if mask is None or bias is None else mask.add_bias(bias)
        return memory_efficient_attention(
            query, key, value, mask if given is None else given, case.dropout, seed=SEED, backend=backend
        )

    return run


def _sdpa(backend: SDPBackend | None, case: AttentionCase) -> Attention:
    """Return torch's own attention, by this backend or by the one that it chooses."""

    def run(inputs: Inputs) -> Tensor:
        query, key, value = _heads_first(inputs)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=inputs.bias,
            dropout_p=case.dropout,
            is_causal=case.causal,
            enable_gqa=case.key_heads != case.H,
        )
        return out.transpose(1, 2)

    def run_by_name(inputs: Inputs) -> Tensor:
        assert backend is not None
        try:
            # torch warns of each backend that refuses; only the last line is in the error.
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")
                return run(inputs)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Unavailable("refuses the case") from None
            raise

    return run if backend is None else run_by_name


def _flex(case: AttentionCase) -> Attention:
    """Return FlexAttention, compiled.

    Its score function reads the bias, which has a gradient there.
    """
    if case.device != "cuda":
        raise Unavailable("its backward needs CUDA")
    if case.dropout:
        raise Unavailable("it has no dropout")
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    # Code compiled for earlier cases counts towards the limit of recompilations unless it is reset.
    torch.compiler.reset()
    full = case.bias
    block_mask = None
    if case.causal:
        # Uncompiled, it would make the M x N mask.
        make = torch.compile(flex.create_block_mask)
        block_mask = make(_seen_if_causal, None, None, case.M, case.M, device=case.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            assert bias is not None
            assert full is not None
            place = tuple(index if whole else 0 for index, whole in zip((b, h, i, j), full))
            return score + bias[place]

        return flex.flex_attention(  # type: ignore[no-any-return]
            query,
            key,
            value,
            score_mod=None if bias is None else biased,
            block_mask=block_mask,
            enable_gqa=case.key_heads != case.H,
        )

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def run(inputs: Inputs) -> Tensor:
        return compiled(*_heads_first(inputs), inputs.bias).transpose(1, 2)  # type: ignore[no-any-return]

    return run


def _seen_if_causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def _eager(case: AttentionCase) -> Attention:
    """Return the lines that everybody has written: all scores, in the dtype of the inputs."""
    hidden_MN = None
    if case.causal:
        hidden_MN = torch.ones(case.M, case.M, dtype=torch.bool, device=case.device).triu_(1)

    def run(inputs: Inputs) -> Tensor:
        query, key, value = _heads_first(inputs)
        if case.key_heads != case.H:
            key, value = (each.repeat_interleave(case.H // case.key_heads, 1) for each in (key, value))
        score_BHMN = query @ key.mT * case.K**-0.5
        if inputs.bias is not None:
            score_BHMN = score_BHMN + inputs.bias
        if hidden_MN is not None:
            score_BHMN = score_BHMN.masked_fill(hidden_MN, -torch.inf)
        weight_BHMN = F.dropout(score_BHMN.softmax(-1), case.dropout)
        return (weight_BHMN @ value).transpose(1, 2)

    return run


def _xformers(case: AttentionCase) -> Attention:
    if case.device != "cuda":
        raise Unavailable("its kernels need CUDA")
    if case.key_heads != case.H:
        raise Unavailable("it takes other shapes where query heads share a key head")
    try:
        ops = importlib.import_module("xformers.ops")
    except ModuleNotFoundError as missing:
        raise Unavailable(f"not installed: {missing}") from None
    causal = ops.LowerTriangularMask() if case.causal else None

    def run(inputs: Inputs) -> Tensor:
        query, key, value, bias, _ = inputs
        mask = causal
        if bias is not None:
            mask = bias.expand(case.B, case.H, case.M, case.M)
        return ops.memory_efficient_attention(query, key, value, mask, case.dropout)  # type: ignore[no-any-return]

    return run


def _heads_first(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [B, H, M, K]."""
    query, key, value = (each.transpose(1, 2) for each in inputs[:3])
    return query, key, value


ATTENTION_PROVIDERS = (
    _lowtide("lowtide", "auto", "cuda", "cpu"),
    _lowtide("lowtide-triton", "triton", "cuda"),
    _lowtide("lowtide-torch", "torch", "cpu"),
    AttentionProvider("sdpa", "torch", partial(_sdpa, None)),
    AttentionProvider("sdpa-cudnn", "torch", partial(_sdpa, SDPBackend.CUDNN_ATTENTION)),
    AttentionProvider("sdpa-flash", "torch", partial(_sdpa, SDPBackend.FLASH_ATTENTION)),
    AttentionProvider("sdpa-efficient", "torch", partial(_sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    AttentionProvider("sdpa-math", "torch", partial(_sdpa, SDPBackend.MATH)),
    AttentionProvider("flex", "torch", _flex),
    AttentionProvider("eager", "torch", _eager),
    AttentionProvider("xformers", "xformers", _xformers),
)
