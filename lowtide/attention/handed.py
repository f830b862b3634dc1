"""The plain case, handed on: torch's own scaled_dot_product_attention, where one of its kernels computes
exactly what is asked for, in O(M) memory. Its dense fallback is switched off, so that it cannot be reached.

Those kernels cannot be differentiated twice, and know no transforms. So the graph of the one call is kept
inside an autograd function, whose backward runs it, or, where that is to be differentiated, goes the
transforms' way.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E of values.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# By name: ours may have been put in its place there.
from torch.nn.functional import scaled_dot_product_attention as torchs_own

from lowtide.attention.autograd import Gradients, again
from lowtide.attention.masks import AttentionBias, Band, intervals, is_plain_causal
from lowtide.attention.problem import Operands, Options, sizes
from lowtide.derivatives import is_differentiated, placed

FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
FUSED_NUMBERS = tuple(backend.value for backend in FUSED)
CUDA_DTYPES = (torch.bfloat16, torch.float16)


def reason_against(
    operands: Operands,
    mask: AttentionBias | None,
    window: Band | None,
    options: Options,
    with_logsumexp: bool,
) -> str | None:
    """Why torch's kernels cannot take the call, or are not known to; None if they can."""
    size = sizes(operands)
    causal = mask is not None
    own = {
        "it gives no logsumexp": with_logsumexp,
        "it takes no soft cap": options.softcap != 0,
        "its dropout depends on the kernel": options.dropout != 0,
        "its biases are dense": operands.bias is not None,
        "it takes no mask but a causal one": mask is not None and not is_plain_causal(mask, size.M, size.N),
        "it takes no window": window is not None,
        "it needs as many features of values as of keys": size.K != size.E,
        "it needs something to attend": 0 in size,
        "it needs features that lie side by side": any(each.stride(-1) != 1 for each in operands[:3]),
    }
    if operands.device.type == "cuda":
        own |= {
            "its kernels for float32 are slower": operands.query.dtype not in CUDA_DTYPES,
            "it takes at most 256 features, a multiple of 8": size.K > 256 or size.K % 8 != 0,
            "its causal mask needs as many queries as keys": causal and size.M != size.N,
            "its strides must be multiples of 8": any(
                stride % 8 for each in operands[:3] for stride in each.stride()[:-1]
            ),
        }
    return next((reason for reason, holds in own.items() if holds), None)


def attention(operands: Operands, causal: bool, options: Options) -> Tensor:  # [B, H, M, E]
    if torch.compiler.is_compiling():
        return _sdpa(operands, causal, options)
    tracked = torch.is_grad_enabled() and any(each.requires_grad for each in operands[:3])
    if not tracked:
        return _sdpa(operands, causal, options)
    return _Handed.apply(causal, options, *operands[:3])  # type: ignore[no-any-return]


def _sdpa(operands: Operands, causal: bool, options: Options) -> Tensor:
    query, key, value = operands[:3]
    shared = False
    if query.shape[1] != key.shape[1]:  # an if: to torch.compile the comparison may be no bool
        shared = True
    given: dict[str, Any] = {"is_causal": causal, "scale": options.scale, "enable_gqa": shared}
    if not torch.compiler.is_compiling() and _is_fused_already(operands, given):
        return torchs_own(query, key, value, **given)
    with torch.autocast(operands.device.type, enabled=False), sdpa_kernel(FUSED):
        return torchs_own(query, key, value, **given)


def _is_fused_already(operands: Operands, given: dict[str, Any]) -> bool:
    """Whether torch takes one of these kernels with its settings as they are, by the function that it asks
    itself (it knows no subclasses). To change the settings and restore them takes the host 25 us."""
    tensors, device = operands[:3], operands.device.type
    if any(type(tensor) is not Tensor for tensor in tensors):
        return False
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != operands.query.dtype:
        return False  # float64, which autocast would cast
    return torch._fused_sdp_choice(*tensors, **given) in FUSED_NUMBERS


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, causal: bool, options: Options, *tensors: Tensor) -> Tensor:
        ctx.causal, ctx.options = causal, options
        ctx.save_for_backward(*tensors)
        ctx.wanted = tuple(tensor.requires_grad for tensor in tensors)
        with torch.enable_grad():
            ctx.own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            ctx.out = _sdpa(Operands(*ctx.own), causal, options)
        return ctx.out.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Gradients:  # type: ignore[override]
        tensors = ctx.saved_tensors
        if is_differentiated(upstream):
            operands, M, N = Operands(*tensors), tensors[0].shape[2], tensors[1].shape[2]
            if ctx.causal:
                found = intervals(None, Band(right=0), M, N, operands.device)
                assert found is not None
                operands = operands._replace(first=found.first_M, end=found.end_M)
            gradients = again(operands, ctx.options, (*ctx.wanted, False), (upstream, None))[:3]
        else:
            wanted = [own for own in ctx.own if own.requires_grad]
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            found = torch.autograd.grad(ctx.out, wanted, upstream, retain_graph=keep)
            gradients = placed(found, ctx.wanted)
        return (None, None, *gradients)
