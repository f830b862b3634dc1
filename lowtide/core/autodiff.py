"""What is at work around a call, and gradients that can be differentiated in their turn: what each operator's
backward asks before it takes the transforms' way (row_function.py).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad


def active(*tensors: Tensor | None) -> bool:
    """Whether a transform of torch.func, forward mode or a batched gradient is at work."""
    functorch = torch._C._functorch
    if functorch.maybe_current_level() is not None:  # which torch.compile itself refuses to trace
        return True
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            raise NotImplementedError("forward mode inside torch.compile: compile what is outside of it")
        return False
    return any(
        functorch.is_legacy_batchedtensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
        if tensor is not None
    )


def is_differentiated(*upstream: Tensor | None) -> bool:
    """Whether backward is to be differentiated (create_graph), or its upstream gradients are batched."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or active(*upstream))


def differentiable_gradients(
    function: Callable[[list[Tensor | None]], tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    wanted: Sequence[bool],
    upstream: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Of the wanted tensors, so that they can be differentiated in their turn."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views of their own: one tensor may be an input and a weight at once.
        own = [each if each is None else each.view_as(each) for each in tensors]
        outputs = function(own)
        used = [(out, gradient) for out, gradient in zip(outputs, upstream) if gradient is not None]
        found = torch.autograd.grad(
            [out for out, _ in used],
            [each for each, grad in zip(own, wanted) if grad],
            [gradient for _, gradient in used],
            create_graph=create_graph,
        )
    return placed(found, wanted)


def placed(found: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor | None, ...]:
    each = iter(found)
    return tuple(next(each) if grad else None for grad in wanted)
