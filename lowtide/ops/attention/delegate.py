"""Hand the plain case on to torch's own scaled_dot_product_attention.

The plain case is what one of torch's kernels computes exactly, in O(M) memory. Torch's dense
fallback is switched off, so it cannot be reached.

These kernels cannot be differentiated twice and support no transforms. So an autograd function
stores the graph of the one call, and its backward runs that graph. A backward that is itself
differentiated goes through higher_order.py.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E
of values.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import sdpa_kernel

# Imported by name: the attribute of torch.nn.functional may have been replaced by ours.
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from lowtide.core import torch_private
from lowtide.core.autodiff import is_differentiated, scatter_gradients
from lowtide.ops.attention.definition.masks import Band, intervals
from lowtide.ops.attention.definition.operands import Operands, Options
from lowtide.ops.attention.operator.autograd import Gradients, differentiable_backward
from lowtide.ops.attention.sdpa import alignment
from lowtide.ops.attention.sdpa.kernels import FUSED, FUSED_NUMBERS


def attention(operands: Operands, causal: bool, options: Options) -> Tensor:  # [B, H, M, E]
    """Compute attention by torch's kernels, [B, H, M, E], with a gradient where one is needed."""
    tracked = torch.is_grad_enabled() and any(each.requires_grad for each in operands[:3])
    if not tracked:
        return _sdpa(operands, causal, options)
    return _Delegated.apply(causal, options, *operands[:3])  # type: ignore[no-any-return]


def _sdpa(operands: Operands, causal: bool, options: Options) -> Tensor:
    """Call torch's function with only its fused kernels enabled."""
    query, key, value = operands[:3]
    given = {
        "is_causal": causal,
        "scale": options.scale,
        "enable_gqa": query.shape[1] != key.shape[1],
        "dropout_p": alignment.NO_DROPOUT,
    }
    if _is_fused_already(operands, given):
        return torch_sdpa(query, key, value, **given)
    with torch.autocast(operands.device.type, enabled=False), sdpa_kernel(FUSED):
        return torch_sdpa(query, key, value, **given)


def _is_fused_already(operands: Operands, given: dict[str, Any]) -> bool:
    """Return True if torch takes a fused kernel under its present settings.

    This asks the function that torch itself asks, which does not know subclasses. Changing the
    settings and restoring them takes the host 25 us.
    """
    tensors, device = operands[:3], operands.device.type
    if any(type(tensor) is not Tensor for tensor in tensors):
        return False
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != operands.query.dtype:
        return False  # autocast is to be off for float64, which it would cast
    return torch_private.fused_sdp_choice(*tensors, **given) in FUSED_NUMBERS


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


class _Delegated(torch.autograd.Function):
    """Differentiate one call of torch's function by the graph that forward keeps."""

    @staticmethod
    def forward(ctx: Any, causal: bool, options: Options, *tensors: Tensor) -> Tensor:
        ctx.causal, ctx.options = causal, options
        ctx.save_for_backward(*tensors)
        ctx.needs_grad = tuple(tensor.requires_grad for tensor in tensors)
        # Under the caller's hooks a saved tensor could come back with other strides or at another
        # address.
        hooked = torch_private.top_saved_tensors_hooks(False) is not None
        hooks = saved_tensors_hooks(_unchanged, _unchanged) if hooked else nullcontext()
        with torch.enable_grad(), hooks:
            ctx.own = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            ctx.out = _sdpa(Operands(*ctx.own), causal, options)
        return ctx.out.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Gradients:  # type: ignore[override]
        tensors = ctx.saved_tensors
        if is_differentiated(grad_output):
            operands, M, N = Operands(*tensors), tensors[0].shape[2], tensors[1].shape[2]
            if ctx.causal:
                found = intervals(None, Band(right=0), M, N, operands.device)
                assert found is not None
                operands = operands._replace(first=found.first_M, end=found.end_M)
            gradients = differentiable_backward(
                operands, ctx.options, (*ctx.needs_grad, False), (grad_output, None)
            )[:3]
        else:
            inputs = [own for own in ctx.own if own.requires_grad]
            grad_output = alignment.readable_like(grad_output, ctx.out)
            keep = torch_private.keeps_graph()
            found = torch.autograd.grad(ctx.out, inputs, grad_output, retain_graph=keep)
            gradients = scatter_gradients(found, ctx.needs_grad)
        return (None, None, *gradients)
