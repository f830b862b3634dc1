"""The way for everything that a fused operator cannot know: derivatives of higher order, forward mode, vmap,
gradients of a target or of class weights. The definition itself, chunk by chunk of rows (rowwise.py): exact,
in bounded memory, not fast.

Shapes: N tokens, V classes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.linear_cross_entropy import reference
from lowtide.linear_cross_entropy.head import Head, Options
from lowtide.linear_cross_entropy.workspace import allowed, too_small
from lowtide.rowwise import Rowwise, Tensors

# Tensors of the size of a chunk's logits that a derivative holds at once.
COPIES = 12


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


def rows_of_copies(
    V: int, copies: int, dtype: torch.dtype, workspace: int | None, device: torch.device
) -> int:
    """Rows at a time, each of whose logits a derivative holds so many times."""
    row, bytes = copies * V * dtype.itemsize, allowed(workspace, device.type)
    if bytes < row:
        several = f"{copies} times over where derivatives of higher order, forward mode or vmap are at work"
        raise too_small(bytes, row, f"one row of {V} logits, {several}")
    return bytes // row


def gradients(
    function: Callable[[list[Tensor | None]], Tensors],
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


def linear_cross_entropy(
    head: Head, target: Tensor, class_weight_V: Tensor | None, options: Options
) -> Tensor:
    target = reference.flat_target(target)

    def losses(head: Head, target: Tensor, class_weight_V: Tensor | None) -> Tensors:
        return (reference.losses(reference.logits(head, options), target, class_weight_V, options),)

    (loss_N,) = _by_rows(losses, 1, head, target, class_weight_V, options)
    return reference.reduce(loss_N, target, class_weight_V, options)


def linear_log_probs(head: Head, target: Tensor, options: Options) -> Tensors:
    def log_probs(head: Head, target: Tensor, _: None) -> Tensors:
        return reference.log_probs(reference.logits(head, options), target, options)

    return _by_rows(log_probs, 4, head, reference.flat_target(target), None, options)


def _by_rows(
    function: Callable[[Head, Tensor, Tensor | None], Tensors],
    results: int,
    head: Head,
    target: Tensor,
    class_weight_V: Tensor | None,
    options: Options,
) -> Tensors:
    head = reference.flat(head, options)
    terms = len(head.inputs)

    def chunk(rows: Tensors, whole: Tensors) -> tuple[Tensors, Tensors]:
        rest = iter(whole[terms:])
        bias, scale, weight = (
            None if own is None else next(rest) for own in (head.bias, head.scale, class_weight_V)
        )
        return function(Head(rows[:-1], whole[:terms], bias, scale), rows[-1], weight), ()

    rows = rows_of_copies(head.classes, COPIES, options.sum_dtype, options.workspace, head.device)
    whole = (*head.weights, head.bias, head.scale, class_weight_V)
    return Rowwise(chunk, terms + 1, results, rows)(
        *head.inputs, target, *(each for each in whole if each is not None)
    )
