"""Call torch's own implementations of attention on a case.

Legend: B batches, H query heads, G key heads, M queries, N keys, K features of keys, E of values.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowtide.tools.bench.attention.cases import Attention, AttentionCase, Inputs
from lowtide.tools.bench.providers import Unavailable
from lowtide.tools.eager import eager_attention


def refuse(case: AttentionCase, **options: object) -> None:
    """Raise Unavailable if the case has one of these options; users see the keywords as names."""
    taken = [name.replace("_", " ") for name, value in options.items() if value]
    if taken:
        raise Unavailable(f"not taken: {', '.join(taken)}")


def sdpa(backend: SDPBackend | None, case: AttentionCase) -> Attention:
    """Return torch's own attention by this backend or, for None, by the one that torch chooses.

    A mask that torch does not have is passed as a dense tensor, which is made once, unless a
    gradient needs it in each call. Shared key heads are then repeated, as in Transformers, since
    torch's kernels take either a dense mask or shared key heads.
    """
    refuse(case, a_soft_cap=case.softcap, sinks=case.sinks)
    dense = bool(case.lengths or case.window or case.padded or case.bias)
    is_causal = case.causal and not dense and case.keys == case.M
    lower_right = case.causal and not dense and not is_causal
    own_mask: Any = None
    if lower_right:  # the module of these masks imports Dynamo, which every command would wait for
        own_mask = importlib.import_module("torch.nn.attention.bias").causal_lower_right(case.M, case.keys)
    seen = case.seen() if dense else None
    shared = case.key_heads != case.H
    known: list[Tensor] = []

    def mask_of(bias: Tensor | None) -> Any:
        if not dense:
            return own_mask
        if bias is None or seen is None:
            return seen if bias is None else bias
        if known:
            return known[0]
        both = bias.masked_fill(~seen, -torch.inf)
        if not bias.requires_grad:
            known.append(both)
        return both

    def run(inputs: Inputs) -> Tensor:
        query, key, value = _heads_first(inputs)
        if shared and dense:
            key, value = (each.repeat_interleave(case.H // case.key_heads, 1) for each in (key, value))
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask_of(inputs.bias),
            dropout_p=case.dropout,
            is_causal=is_causal,
            enable_gqa=shared and not dense,
        )
        return out.transpose(1, 2)

    def run_by_name(inputs: Inputs) -> Tensor:
        assert backend is not None
        try:
            # torch warns of each backend that refuses; the error has only the last of these lines.
            with warnings.catch_warnings(), sdpa_kernel(backend):
                warnings.simplefilter("ignore")
                return run(inputs)
        except RuntimeError as error:
            if "No available kernel" in str(error) or "No viable backend" in str(error):
                raise Unavailable("refuses the case") from None
            raise

    return run if backend is None else run_by_name


def varlen(case: AttentionCase) -> Attention:
    """Return torch's FlashAttention for sequences of several lengths."""
    if not case.lengths:
        raise Unavailable("it is for sequences of several lengths")
    if case.device != "cuda":
        raise Unavailable("its kernels need CUDA")
    refuse(case, a_bias=case.bias, a_soft_cap=case.softcap, sinks=case.sinks, dropout=case.dropout)
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except ModuleNotFoundError:
        raise Unavailable(f"torch {torch.__version__} has no varlen_attn") from None
    takes = inspect.signature(attend).parameters
    left, right = case.window or (-1, -1)
    options: dict[str, Any] = {}
    if "window_size" in takes:
        options["window_size"] = (left, 0 if case.causal else right)
    elif case.window:
        raise Unavailable(f"in torch {torch.__version__} it has no window")
    else:
        options["is_causal"] = case.causal
    shared = case.key_heads != case.H
    if shared and "enable_gqa" in takes:
        options["enable_gqa"] = True
    return packed(attend, case, options)


def packed(attend: Callable[..., Tensor], case: AttentionCase, options: dict[str, Any]) -> Attention:
    """Return `attend` of the sequences of a case, which lie one after the other."""
    starts = torch.tensor((0, *accumulate(case.lengths)), dtype=torch.int32, device=case.device)
    longest = max(case.lengths)

    def run(inputs: Inputs) -> Tensor:
        tensors = (each[0] for each in inputs[:3])
        return attend(*tensors, starts, starts, longest, longest, **options)[None]

    return run


def flex(case: AttentionCase) -> Attention:
    """Return compiled FlexAttention; its score function reads the bias and gives it a gradient."""
    if case.device != "cuda":
        raise Unavailable("its backward needs CUDA")
    if case.dropout:
        raise Unavailable("it has no dropout")
    module = importlib.import_module("torch.nn.attention.flex_attention")
    # Reset, or the code compiled for earlier cases counts towards the limit of recompilations.
    torch.compiler.reset()
    # Otherwise backward would overwrite the tensors that forward has saved.
    torch._functorch.config.donated_buffer = False  # type: ignore[attr-defined]
    full, keep, rule = case.bias, case.keep(), case.rule()
    block_mask = None
    if rule is not None or keep is not None:

        def shown(b: Any, h: Any, i: Any, j: Any) -> Any:
            if keep is None:
                assert rule is not None
                return rule(i, j)
            return keep[b, 0, 0, j] if rule is None else rule(i, j) & keep[b, 0, 0, j]

        # Without compilation it would make the M x N mask.
        make = torch.compile(module.create_block_mask)
        batches = None if keep is None else case.B
        block_mask = make(shown, batches, None, case.M, case.keys, device=case.device)

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Any:
        def changed(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if case.softcap:
                score = case.softcap * torch.tanh(score / case.softcap)
            if bias is None:
                return score
            assert full is not None
            place = tuple(index if whole else 0 for index, whole in zip((b, h, i, j), full))
            return score + bias[place]

        return module.flex_attention(
            query,
            key,
            value,
            score_mod=changed if case.softcap or bias is not None else None,
            block_mask=block_mask,
            enable_gqa=case.key_heads != case.H,
            return_lse=case.sinks,
        )

    compiled = torch.compile(attend, dynamic=False, fullgraph=True)

    def run(inputs: Inputs) -> Tensor:
        found = compiled(*_heads_first(inputs), inputs.bias)
        if inputs.sink is None:
            return found.transpose(1, 2)  # type: ignore[no-any-return]
        out, lse_BHM = found
        return gated(out.transpose(1, 2), lse_BHM, inputs.sink)

    return run


def gated(out: Tensor, lse_BHM: Tensor, sink_H: Tensor) -> Tensor:
    """Return the result with sinks [B, M, H, E], computed from the result without sinks."""
    gate_BHM = torch.sigmoid(lse_BHM - sink_H[:, None])
    return out * gate_BHM.transpose(1, 2)[..., None].to(out.dtype)


def eager(case: AttentionCase) -> Attention:
    """Return the usual eager attention, with all scores in the dtype of the inputs."""
    seen = case.seen()
    hidden = None if seen is None else ~seen

    def run(inputs: Inputs) -> Tensor:
        query, key, value, bias, _, sink = inputs
        return eager_attention(query, key, value, bias, sink, hidden, case.softcap, case.dropout)

    return run


def _heads_first(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return views [B, H, M, K]."""
    query, key, value = (each.transpose(1, 2) for each in inputs[:3])
    return query, key, value
