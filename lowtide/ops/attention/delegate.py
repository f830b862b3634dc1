"""Pass a call to torch's own scaled_dot_product_attention.

backend.py chooses this way for calls that one of torch's kernels computes exactly, in O(M) memory.
Torch's dense fallback is switched off, so it cannot run.

The caller's autograd graph gets torch's own node, without a node of lowtide's around it. Torch's
kernels support neither second derivatives nor batched gradients, and its CUDA kernels misread some
upstream gradients. A hook on the node handles these cases in backward.

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E
of values.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

# Import the function itself: a caller may have replaced the attribute of torch.nn.functional by
# lowtide's function.
from torch.nn.functional import scaled_dot_product_attention as torch_sdpa

from lowtide.core import torch_private
from lowtide.core.autodiff import is_differentiated
from lowtide.ops.attention.definition.intervals import Band
from lowtide.ops.attention.definition.masks import intervals
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands
from lowtide.ops.attention.operator import autograd
from lowtide.ops.attention.sdpa import alignment
from lowtide.ops.attention.sdpa.kernels import FUSED, FUSED_NUMBERS

Gradients = tuple[Tensor | None, ...]


def attention(operands: Operands, causal: bool, options: AttentionOptions) -> Tensor:  # [B, H, M, E]
    """Compute attention by torch's kernels."""
    handed = SdpaCall(operands, causal, options)
    if handed.is_fused(operands):
        return handed.run(*operands[:3])
    with torch.autocast(operands.device.type, enabled=False), sdpa_kernel(FUSED):
        return handed.run(*operands[:3])


class SdpaCall:
    """Hold the options of a call, as lowtide's and as arguments of torch's function."""

    __slots__ = ("given", "options")

    def __init__(self, operands: Operands, causal: bool, options: AttentionOptions) -> None:
        self.options = options._replace(backend="sdpa", causal=causal)
        self.given = {
            "is_causal": causal,
            "scale": options.scale,
            "enable_gqa": operands.query.shape[1] != operands.key.shape[1],
            "dropout_p": alignment.NO_DROPOUT,
        }

    def is_fused(self, operands: Operands) -> bool:
        """Return True if torch takes a fused kernel with its present settings.

        Then the settings can stay: changing and restoring them takes the host 25 us. The answer is
        that of the function that torch itself asks, which does not know subclasses of Tensor.
        """
        tensors, device = operands[:3], operands.device.type
        if any(type(tensor) is not Tensor for tensor in tensors):
            return False
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != operands.query.dtype:
            return False  # float64, which torch's function would cast under autocast
        return torch_private.fused_sdp_choice(*tensors, **self.given) in FUSED_NUMBERS

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # [B, H, M, E]
        """Call torch's function, and hook the node that it adds to the autograd graph."""
        if not (query.requires_grad or key.requires_grad or value.requires_grad):
            return torch_sdpa(query, key, value, **self.given)
        if not torch.is_grad_enabled():
            return torch_sdpa(query, key, value, **self.given)
        # Hooks on saved tensors may bring these back in strides or at addresses that torch's
        # kernels misread. With such hooks the operator runs, which checks what comes back.
        if torch_private.current_node is not None and torch_private.top_saved_tensors_hooks(False) is None:
            out = torch_sdpa(query, key, value, **self.given)
            node = out.grad_fn
            if hasattr(type(node), "_saved_query"):
                node.register_prehook(partial(_before_backward, out.stride()))
                return out
        return autograd.attention(Operands(query, key, value), self.options, False)[0]


def _before_backward(strides: tuple[int, ...], grad_outputs: Gradients) -> Gradients | None:
    """Return an upstream gradient that torch's kernels read correctly, or None to keep this one.

    `strides` are the result's. If backward is to be differentiated, torch's kernel gets zeros, and
    a second hook replaces the gradients that it returns.
    """
    grad_output, *others = grad_outputs
    if grad_output is None:
        return None
    if is_differentiated(grad_output):
        zeros = torch.empty_strided(
            grad_output.shape, strides, dtype=grad_output.dtype, device=grad_output.device
        ).zero_()
        node = torch_private.current_node()
        handles: list[Any] = []
        after = partial(_after_backward, handles, grad_output, zeros)
        handles.append(node.register_hook(after))
        return zeros, *others
    readable = alignment.readable_in(grad_output, strides)
    return None if readable is grad_output else (readable, *others)


def _after_backward(
    handles: list[Any], grad_output: Tensor, zeros: Tensor, grad_inputs: Gradients, grad_outputs: Gradients
) -> Gradients | None:
    """Return gradients that can be differentiated, in place of those of torch's kernel."""
    if grad_outputs[0] is not zeros:  # this pass of backward is another thread's
        return None
    handles.pop().remove()
    node = torch_private.current_node()
    operands = Operands(node._saved_query, node._saved_key, node._saved_value)
    if node._saved_is_causal:
        M, N = operands.query.shape[2], operands.key.shape[2]
        seen = intervals(None, Band(right=0), M, N, operands.device)
        assert seen is not None
        operands = operands._replace(first=seen.first_M, end=seen.end_M)
    needs_grad = [each is not None for each in (*grad_inputs[:3], None)]
    found = autograd.differentiable_backward(
        operands, AttentionOptions(node._saved_scale), needs_grad, (grad_output, None)
    )
    return *found[:3], *grad_inputs[3:]
