"""Whether a tensor is numbers in memory, at strides: what every kernel here works on."""

import torch
from torch import Tensor


def reason_against(tensor: Tensor) -> str | None:
    """What kind of tensor it is instead, and what to do; None if it is dense."""
    if _is_nested(tensor):  # before anything else: it has no sizes
        return "a nested one; use torch.nested.to_padded_tensor(), or call for each of its tensors (unbind())"
    if tensor.layout is not torch.strided:
        return f"one of layout {tensor.layout}; use .to_dense()"
    return "a quantized one; use .dequantize()" if tensor.is_quantized else None


def _is_nested(tensor: Tensor) -> bool:
    functorch = torch._C._functorch
    # A batch of vmap does not say what it is of. (torch.compile traces none of this.)
    if not torch.compiler.is_compiling() and functorch.maybe_current_level() is not None:
        while functorch.is_functorch_wrapped_tensor(tensor):
            tensor = functorch.get_unwrapped(tensor)
    return tensor.is_nested
