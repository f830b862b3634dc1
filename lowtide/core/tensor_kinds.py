"""Reject tensors that are not numbers in memory at strides, which every kernel here requires."""

import torch
from torch import Tensor


def reason_against(tensor: Tensor) -> str | None:
    """Return the kind of tensor it is instead, and what to do; None if it is dense."""
    if _is_nested(tensor):  # first, since a nested tensor has no sizes
        return "a nested one; use torch.nested.to_padded_tensor(), or call for each of its tensors (unbind())"
    if tensor.layout is not torch.strided:
        return f"one of layout {tensor.layout}; use .to_dense()"
    return "a quantized one; use .dequantize()" if tensor.is_quantized else None


def _is_nested(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    # A batched tensor of vmap does not tell whether it wraps a nested one, so unwrap it.
    # torch.compile traces none of this.
    if not torch.compiler.is_compiling() and functorch.maybe_current_level() is not None:
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
    return tensor.is_nested
