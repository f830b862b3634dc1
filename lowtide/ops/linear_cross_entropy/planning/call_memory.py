"""Count bytes of a whole call that do not depend on its chunks.

One count is that of the dense computation, which has no workspace. The other is what a
K-dimensional loss holds beyond the loss of one position.

"Dense" means eager torch, `F.cross_entropy(F.linear(input, weight), target)`, in the dtype of the
GEMMs. Its memory is largest at one of two moments of backward. At the first, three tensors of all
logits exist and no gradient of the head does: the log-softmax, its gradient, and the gradient of
the logits. At the second, the gradient of the logits and all gradients of the head exist. Without
gradients, two tensors exist: the logits and their log-softmax. Autocast computes the cross entropy
in float32.

Shapes: N tokens, D features, V classes, P positions.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.definition.head import Head
from lowtide.ops.linear_cross_entropy.planning.call import Call


def may_depend_on_tokens(tokens: int) -> bool:
    """Return True if a plan may depend on this number of tokens.

    In a compiled or exported graph the number may be a symbol, which Dynamo shows as an int. A
    decision on a symbol would divide one graph for any length into two, and torch.export would
    raise an error.
    """
    return not torch.compiler.is_compiling() and isinstance(tokens, int)


def dense_workspace(call: Call) -> int | None:
    """Return the peak bytes of the dense computation beyond inputs, loss and gradients.

    Return None if the plan must not depend on N, or, with segments, on the number of ranks.
    """
    head, options = call.head, call.options
    if options.segments or not may_depend_on_tokens(head.tokens):
        return None
    positions = head.weights[0].shape[1] if head.by_position else 1
    dtypes = {each.dtype for each in (*head.inputs, *head.weights)}
    logits = call.N * positions * call.V
    dense = dense_bytes(logits, dtypes, options.compute_dtype, options.sum_dtype, call.trained)
    if head.by_position and options.reduction != "none":
        dense -= position_bytes(head, call.needs_grad.all, options.sum_dtype)
    return dense


def dense_bytes(
    logits: int,
    dtypes: Iterable[torch.dtype],
    compute_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    tracked: Sequence[Tensor],
    tensors: tuple[int, int] = (2, 3),
) -> int:
    """Return the peak bytes of the dense computation of `logits` logits.

    `dtypes` are those of the operands, and the `tracked` tensors get gradients. `tensors` is how
    many tensors of the logits' size exist without and with gradients. The copies of operands that
    autocast makes are not counted, since on CUDA lowtide holds such copies as well.
    """
    casts = any(each != compute_dtype for each in dtypes)
    size = (sum_dtype if casts else compute_dtype).itemsize
    without, within = tensors
    if not tracked:
        return without * size * logits
    # One tensor of the logits beside all gradients. Autocast frees this tensor before it casts the
    # gradients, but then holds the weight gradient in both dtypes. If N < D, the case that matters,
    # this second weight gradient is the larger of the two.
    last = compute_dtype.itemsize * logits
    return max(within * size * logits - sum(each.numel() * each.itemsize for each in tracked), last)


def position_bytes(head: Head, needs_grad: Sequence[bool], sum_dtype: torch.dtype) -> int:
    """Return the bytes that a K-dimensional loss holds beyond those of a call of one position.

    They hold the gradients of one position, which a call of one position would return. If a
    half-precision input needs a gradient, they also hold its copy in the sum's dtype.
    """
    (input,), (weight,) = head.inputs, head.weights
    shared = input.numel() * sum_dtype.itemsize * needs_grad[0]
    wide = shared if input.dtype != sum_dtype else 0
    return shared + wide + weight.select(1, 0).numel() * sum_dtype.itemsize * needs_grad[1]
