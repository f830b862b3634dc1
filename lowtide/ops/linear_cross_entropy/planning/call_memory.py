"""Bytes of a whole call, whatever its chunks are: what the dense computation would hold in place of a
workspace, and what a K-dimensional loss holds beside its own.

Dense means eager torch, `F.cross_entropy(F.linear(input, weight), target)`, in the dtype of the products.
Three tensors of all logits exist in backward (the log-softmax, its gradient and that of the logits) before a
gradient of the head does, and one of them beside all of these gradients. Autocast takes the cross entropy in
float32. Without gradients there are the logits and their log-softmax.

Shapes: N tokens, D features, V classes, P positions.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.definition.head import Head, Options


def tokens_decide(tokens: int) -> bool:
    """Return whether a plan may depend on this number of tokens. In a compiled or an exported graph it may be
    a symbol (Dynamo shows it as an int): two graphs would take the place of one of any length, and an export
    would be refused."""
    return not torch.compiler.is_compiling() and isinstance(tokens, int)


def dense_workspace(head: Head, options: Options, wanted: Sequence[bool]) -> int | None:
    """Return the bytes that the dense computation of this call holds beyond inputs, loss and gradients, at
    its highest moment; None where N must not decide."""
    if not tokens_decide(head.tokens):
        return None
    positions = head.weights[0].shape[1] if head.by_position else 1
    tracked = [each for each, grad in zip(head.tensors, wanted) if grad and each is not None]
    dtypes = {each.dtype for each in (*head.inputs, *head.weights)}
    dense = dense_bytes(
        head.tokens * positions * head.classes, dtypes, options.compute_dtype, options.sum_dtype, tracked
    )
    if head.by_position and options.reduction != "none":
        dense -= held_beside(head, wanted, options.sum_dtype)
    return dense


def dense_bytes(
    logits: int,
    dtypes: Iterable[torch.dtype],
    compute_dtype: torch.dtype,
    sum_dtype: torch.dtype,
    tracked: Sequence[Tensor],
    tensors: tuple[int, int] = (2, 3),
) -> int:
    """Return that of so many logits, with operands of these dtypes, where these tensors get gradients.
    `tensors` of the logits' size exist without and with gradients. What autocast copies is not counted: on
    CUDA lowtide holds such copies as well."""
    casts = any(each != compute_dtype for each in dtypes)
    size = (sum_dtype if casts else compute_dtype).itemsize
    without, within = tensors
    if not tracked:
        return without * size * logits
    # One of the logits beside all gradients. Under autocast it is gone before these are cast, but then the
    # weight's gradient exists in both dtypes, which is more wherever it matters (N < D).
    last = compute_dtype.itemsize * logits
    return max(within * size * logits - sum(each.numel() * each.itemsize for each in tracked), last)


def held_beside(head: Head, wanted: Sequence[bool], sum_dtype: torch.dtype) -> int:
    """Bytes of a K-dimensional loss beside what a call of one position holds: its gradients, which that call
    would return, and a wide input."""
    (input,), (weight,) = head.inputs, head.weights
    shared = input.numel() * sum_dtype.itemsize * wanted[0]
    wide = shared if input.dtype != sum_dtype else 0
    return shared + wide + weight.select(1, 0).numel() * sum_dtype.itemsize * wanted[1]
