"""The way for everything that a fused operator cannot know: derivatives of higher order, forward mode, vmap,
gradients of a target or of class weights. The definition itself, chunk by chunk of rows (rowwise.py): exact,
in bounded memory, not fast.

Shapes: N tokens, V classes.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lowtide.linear_cross_entropy import reference
from lowtide.linear_cross_entropy.check import ArgumentError
from lowtide.linear_cross_entropy.head import Head, Options
from lowtide.linear_cross_entropy.workspace import DEFAULT_WORKSPACE
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

    workspace = options.workspace
    if workspace is None:
        workspace = DEFAULT_WORKSPACE["cuda" if head.device.type == "cuda" else "cpu"]
    row = COPIES * head.classes * options.sum_dtype.itemsize
    if workspace < row:
        raise ArgumentError(
            f"workspace must hold one row of {head.classes} logits, {COPIES} times over where derivatives "
            f"of higher order, forward mode or vmap are at work, which takes {row} bytes, got {workspace} "
            "bytes"
        )
    rows = workspace // row
    whole = (*head.weights, head.bias, head.scale, class_weight_V)
    return Rowwise(chunk, terms + 1, results, rows)(
        *head.inputs, target, *(each for each in whole if each is not None)
    )
