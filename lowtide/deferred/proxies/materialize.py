"""Make real logits of recorded ones.

Shapes: [...] are the rows, V classes.
"""

import functools

import torch
from torch import Tensor

from lowtide.deferred.proxies.head_call import HeadCall
from lowtide.deferred.recorded import chunks, expression
from lowtide.deferred.recorded.expression import Node


def materialized(node: Node, meta: Tensor, head_call: HeadCall, class_dim: int, operation: str) -> Tensor:
    """Return the logits as a tensor with the shape and strides of `meta`; count the operation."""
    # Let the hidden states, which are small, carry the count: a compiled graph copies the tensor
    # that carries it.
    counted = functools.partial(head_call.counts.on, event=operation)
    # Turn gradients on: a view made without them could not be changed in place where they are on,
    # and the count would cut hidden states off. Where they were off, the tree has a detach of its
    # own.
    with torch.inference_mode(False), torch.enable_grad():
        tensor = _evaluated(expression.with_first_input(node, counted), head_call)
        tensor = tensor.reshape(meta.movedim(class_dim, -1).shape)  # [..., V]
        return _laid_like(meta, tensor.movedim(-1, class_dim))


def _evaluated(node: Node, head_call: HeadCall) -> Tensor:
    """Return the logits by one product, or by chunks if values have been picked from chunks.

    A row's last digits depend on the number of rows in its product, and picked values have to be
    found among the logits. In another checkpoint logits are always made by chunks: values may be
    picked between its two runs, which must save the same tensors.
    """
    if head_call.picked or head_call.in_other_checkpoint:
        return chunks.evaluate(node, head_call.workspace if head_call.picked else None)
    return expression.evaluate(node)


def _laid_like(meta: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor in the strides of `meta`; they decide whether a reshape is a view."""
    strides = zip(meta.shape, meta.stride(), tensor.stride())
    if all(wanted == found for size, wanted, found in strides if size > 1):
        return tensor
    laid = torch.empty_strided(meta.shape, meta.stride(), dtype=tensor.dtype, device=tensor.device)
    return laid.copy_(tensor)
