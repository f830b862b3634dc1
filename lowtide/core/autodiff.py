"""Tell which transforms are active, walk over graphs, and compute differentiable gradients.

Each operator's backward asks here whether it has to use the row function (rowwise/), which
supports all transforms.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.core import torch_private


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Switch autocast off; it does not know meta tensors."""
    if device.type == "meta":
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def in_transform(*tensors: Tensor | None) -> bool:
    """Return True inside a torch.func transform, forward mode or a batched gradient."""
    if torch_private.current_level() is not None:  # torch.compile refuses to trace this call
        return True
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            raise NotImplementedError("forward mode inside torch.compile: compile what is outside of it")
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    for each in given:
        if torch_private.is_legacy_batched(each):
            return True
    in_forward_mode = forward_ad._current_level >= 0
    return in_forward_mode and any(forward_ad.unpack_dual(each).tangent is not None for each in given)


def in_shape(result: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a result that no node has saved in another shape, as no view of it.

    FSDP waits for backward by hooks on results. A change in place of a view, as `loss *= mask`,
    would drop them, and with them all gradients of the unit. Autograd does not see that such a
    change is one of `result` too.
    """
    if result.shape == torch.Size(shape):
        return result
    reshaped: Tensor = torch.ops.aten._unsafe_view.default(result, shape)
    return reshaped


def is_differentiated(*grad_output: Tensor | None) -> bool:
    """Return True if backward is differentiated (create_graph) or its gradients are batched."""
    return not torch.compiler.is_compiling() and (torch.is_grad_enabled() or in_transform(*grad_output))


def graph_nodes(root: Any, is_passed: Callable[[Any], bool] = lambda node: True) -> Iterator[Any]:
    """Yield once each node of an autograd graph, from `root` on; nothing for a root of None.

    The walk does not go beyond a node for which `is_passed` returns False.
    """
    waiting, seen = [] if root is None else [root], {None, root}
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions if is_passed(node) else ():
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def is_leaf(node: Any) -> bool:
    """Return True for a node that accumulates the gradient of a leaf, its `variable`."""
    return hasattr(node, "variable")


def differentiable_gradients(
    function: Callable[[list[Tensor | None]], tuple[Tensor, ...]],
    tensors: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    grad_output: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the tensors that need one, in a form that can be differentiated."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        # Separate views, since one tensor may be both an input and a weight.
        own = [each if each is None else each.view_as(each) for each in tensors]
        outputs = function(own)
        used = [(out, gradient) for out, gradient in zip(outputs, grad_output) if gradient is not None]
        found = torch.autograd.grad(
            [out for out, _ in used],
            [each for each, grad in zip(own, needs_grad) if grad],
            [gradient for _, gradient in used],
            create_graph=create_graph,
        )
    return scatter_gradients(found, needs_grad)


def scatter_gradients(found: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients at the places of the tensors that need one, and None at the others."""
    each = iter(found)
    return tuple(next(each) if grad else None for grad in needs_grad)
