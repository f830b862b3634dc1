"""List every implementation of attention that is measured: ours, torch's own and the peers'.

`load(case)` imports what the provider needs and returns its function of Inputs, [B, M, H, E]. It
raises `Unavailable` where the provider cannot run by design; any other exception, there or later,
is a failure. Both become a row that gives the reason.

Legend: B batches, H query heads, M queries, N keys, E features of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lowtide import attn_bias, memory_efficient_attention, memory_efficient_attention_with_lse
from lowtide.ops.attention import dispatch
from lowtide.ops.attention.backend import BackendChoice
from lowtide.ops.attention.definition.layouts import from_xformers
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionOptions, Operands
from lowtide.ops.attention.definition.validation import Backend, check_window
from lowtide.tools.bench.attention import peers, torch_kernels
from lowtide.tools.bench.attention.cases import Attention, AttentionCase, Inputs
from lowtide.tools.bench.providers import Unavailable

Load = Callable[[AttentionCase], Attention]

SEED = 1


@dataclass(frozen=True)
class AttentionProvider:
    name: str
    distribution: str  # The installed package whose version stands in the provider's rows.
    load: Load
    backend: Backend | None = None  # The backend that one of ours asks for.


def _lowtide(name: str, backend: Backend, *devices: str) -> AttentionProvider:
    return AttentionProvider(name, "lowtide", partial(_own, backend, devices), backend)


def _own(backend: Backend, devices: tuple[str, ...], case: AttentionCase) -> Attention:
    if case.device not in devices:
        raise Unavailable(f"measured on {' and '.join(devices)} alone")
    mask, keep = _mask(case), case.keep()
    options: dict[str, Any] = {"softcap": case.softcap, "window": case.window, "backend": backend}
    if case.dropout:  # calls with a seed are not remembered
        options |= {"p": case.dropout, "seed": SEED}

    def run(inputs: Inputs) -> Tensor:
        operands = *inputs[:3], _joined(mask, keep, inputs.bias)
        if inputs.sink is None:
            return memory_efficient_attention(*operands, **options)
        out, lse_BHM = memory_efficient_attention_with_lse(*operands, **options)
        return torch_kernels.gated(out, lse_BHM, inputs.sink)

    return run


def own_choice(case: AttentionCase, inputs: Inputs, backend: str) -> BackendChoice:
    """Return the backend that such a call of ours takes, and why."""
    given = _joined(_mask(case), case.keep(), inputs.bias)
    mask, bias = (given, given.bias) if isinstance(given, attn_bias.AttentionBias) else (None, given)
    _, *own = from_xformers(*inputs[:3], bias)
    options = AttentionOptions(case.K**-0.5, case.softcap or 0.0, case.dropout, backend=backend)
    band = check_window(case.window)
    return dispatch.choose(AttentionCall(Operands(*own), mask, band, options, case.sinks))


def _mask(case: AttentionCase) -> attn_bias.AttentionBias | None:
    if case.lengths:
        kind = attn_bias.BlockDiagonalCausalMask if case.causal else attn_bias.BlockDiagonalMask
        return kind.from_seqlens(case.lengths, device=case.device)
    if not case.causal:
        return None
    if case.keys == case.M:
        return attn_bias.LowerTriangularMask()
    return attn_bias.LowerTriangularFromBottomRightMask()


def _joined(
    mask: attn_bias.AttentionBias | None, keep: Tensor | None, bias: Tensor | None
) -> Tensor | attn_bias.AttentionBias | None:
    """Return all of them as one argument.

    It takes one tensor: a bias beside padding is summed first.
    """
    tensor = keep if bias is None else bias if keep is None else bias.masked_fill(~keep, -torch.inf)
    if mask is None or tensor is None:
        return tensor if mask is None else mask
    return mask.add_bias(tensor)


def _torch(name: str, load: Load) -> AttentionProvider:
    return AttentionProvider(name, "torch", load)


ATTENTION_PROVIDERS = (
    _lowtide("lowtide", "auto", "cuda", "cpu"),
    _lowtide("lowtide-triton", "triton", "cuda"),
    _lowtide("lowtide-torch", "torch", "cpu"),
    _torch("sdpa", partial(torch_kernels.sdpa, None)),
    _torch("sdpa-cudnn", partial(torch_kernels.sdpa, SDPBackend.CUDNN_ATTENTION)),
    _torch("sdpa-flash", partial(torch_kernels.sdpa, SDPBackend.FLASH_ATTENTION)),
    _torch("sdpa-efficient", partial(torch_kernels.sdpa, SDPBackend.EFFICIENT_ATTENTION)),
    _torch("sdpa-math", partial(torch_kernels.sdpa, SDPBackend.MATH)),
    _torch("varlen", torch_kernels.varlen),
    _torch("flex", torch_kernels.flex),
    _torch("eager", torch_kernels.eager),
    AttentionProvider("xformers", "xformers", peers.xformers),
    AttentionProvider("flash-attn", "flash-attn", peers.flash_attn),
)
