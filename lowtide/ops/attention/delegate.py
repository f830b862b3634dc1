"""Hand the plain case on to torch's own scaled_dot_product_attention.

The plain case is what one of torch's kernels computes exactly, in O(M) memory. Torch's dense
fallback is switched off, so it cannot be reached.

The call stands in the caller's graph as torch's own would: nothing is wrapped around it. Torch's
kernels cannot be differentiated twice, nor with batched gradients, and its CUDA kernels misread
some upstream gradients. So the node of the graph that runs backward has two hooks.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E
of values.
"""

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

# Imported by name: the attribute of torch.nn.functional may have been replaced by ours.
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from lowtide.core import torch_private
from lowtide.core.autodiff import is_differentiated
from lowtide.ops.attention.definition.masks import Band, intervals
from lowtide.ops.attention.definition.operands import Operands, Options
from lowtide.ops.attention.operator import autograd
from lowtide.ops.attention.sdpa import alignment
from lowtide.ops.attention.sdpa.kernels import FUSED, FUSED_NUMBERS

Gradients = tuple[Tensor | None, ...]
# The upstream gradient of the node that runs in this thread, if backward is to be differentiated.
_differentiated = threading.local()


def attention(operands: Operands, causal: bool, options: Options) -> Tensor:  # [B, H, M, E]
    """Compute attention by torch's kernels, [B, H, M, E], with a gradient where one is needed."""
    query, key, value = operands[:3]
    tracked = query.requires_grad or key.requires_grad or value.requires_grad
    if not tracked or not torch.is_grad_enabled():
        return _sdpa(operands, causal, options)
    # Hooks on saved tensors may bring these back in strides or at addresses that torch's kernels
    # misread. The operator looks at what comes back.
    if torch_private.current_node is not None and torch_private.top_saved_tensors_hooks(False) is None:
        out = _sdpa(operands, causal, options)
        node = out.grad_fn
        if node is not None and hasattr(type(node), "_saved_query"):
            node.register_prehook(partial(_before_backward, out.stride()))
            node.register_hook(_after_backward)
            return out
    return autograd.attention(operands, options._replace(backend="sdpa", causal=causal), False)[0]


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
    query, key, value = operands[:3]
    if not (type(query) is type(key) is type(value) is Tensor):
        return False
    device = query.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != query.dtype:
        return False  # autocast is to be off for float64, which it would cast
    return torch_private.fused_sdp_choice(query, key, value, **given) in FUSED_NUMBERS


def _before_backward(strides: tuple[int, ...], grad_outputs: Gradients) -> Gradients | None:
    """Return an upstream gradient that torch's kernels read rightly; `strides` are the result's.

    Where backward is to be differentiated, torch's kernel gets zeros: what it returns is replaced.
    """
    grad_output, *others = grad_outputs
    if grad_output is None:
        return None
    if is_differentiated(grad_output):
        _differentiated.grad_output = grad_output
        plain = torch.empty_strided(
            grad_output.shape, strides, dtype=grad_output.dtype, device=grad_output.device
        )
        return plain.zero_(), *others
    readable = alignment.readable_in(grad_output, strides)
    return None if readable is grad_output else (readable, *others)


def _after_backward(grad_inputs: Gradients, _grad_outputs: Gradients) -> Gradients | None:
    """Return gradients that can be differentiated in place of those that cannot."""
    grad_output = getattr(_differentiated, "grad_output", None)
    if grad_output is None:
        return None
    _differentiated.grad_output = None
    node = torch_private.current_node()
    operands = Operands(node._saved_query, node._saved_key, node._saved_value)
    if node._saved_is_causal:
        M, N = operands.query.shape[2], operands.key.shape[2]
        found = intervals(None, Band(right=0), M, N, operands.device)
        assert found is not None
        operands = operands._replace(first=found.first_M, end=found.end_M)
    needs_grad = [each is not None for each in (*grad_inputs[:3], None)]
    found = autograd.differentiable_backward(
        operands, Options(node._saved_scale), needs_grad, (grad_output, None)
    )
    return *found[:3], *grad_inputs[3:]
