"""Remember which calls torch's own kernels take, so that one alike is handed on by a single check.

Checking and choosing take the host longer than torch's own function. Their answer depends on what a
signature holds (types, shapes, strides, dtypes, devices, options, and torch's settings), and on
addresses, autocast and transforms. These are looked at in each call.

Shapes: B batches; H heads, M queries; E features of values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.autodiff import in_transform
from lowtide.ops.attention.definition.operands import AttentionCall
from lowtide.ops.attention.delegate import Handed
from lowtide.ops.attention.sdpa.alignment import BYTES

Tensors = tuple[Tensor, Tensor, Tensor]
Signature = tuple[Any, ...]


class Entry(NamedTuple):
    """Hold a call that torch's kernels take."""

    handed: Handed
    device: str
    """"cpu" or "cuda"."""
    rows_first: bool
    """True if the caller's tensors are [B, M, H, E], False for [B, H, M, E]."""


# All are forgotten where there are so many, as with sizes that change from call to call.
MOST = 4096
_calls: dict[Signature, Entry] = {}


def signature(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Signature | None:
    """Return what tells calls apart, or None for a call that is not remembered.

    It decides on errors too: a tensor that has no sizes or strides is not remembered.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        return (
            options, torch_private.sdp_settings(), torch.is_grad_enabled(),
            type(query), query.shape, query.stride(), query.dtype, query.device, query.requires_grad,
            type(key), key.shape, key.stride(), key.dtype, key.device, key.requires_grad,
            type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad,
        )  # fmt: skip
    except (AttributeError, RuntimeError):
        return None


def hand_on(known: Signature | None, query: Tensor, key: Tensor, value: Tensor) -> Tensor | None:
    """Return the result in the caller's layout, or None for a call that is not remembered."""
    try:
        entry = _calls.get(known)  # type: ignore[arg-type]
    except TypeError:  # an option that has no hash
        return None
    if entry is None or not _are_usual(entry.device, query, key, value):
        return None
    if not entry.rows_first:
        return entry.handed.run(query, key, value)
    return entry.handed.run(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)


def remember(known: Signature, tensors: Tensors, call: AttentionCall, backend: str) -> None:
    """Remember a call if torch's kernels take its tensors as they are, or transposed."""
    operands, rows_first = call.operands, call.options.rows_first
    device = operands.device.type
    if backend != "sdpa" or not _are_usual(device, *tensors):
        return
    for each, own in zip(tensors, operands):
        turned = each.transpose(1, 2) if rows_first and each.dim() == 4 else each
        if own is None or turned.shape != own.shape or turned.stride() != own.stride():
            return
    handed = Handed(operands, call.mask is not None, call.options)
    if not handed.is_fused(operands):
        return
    if len(_calls) >= MOST:
        _calls.clear()
    _calls[known] = Entry(handed, device, rows_first)


def _are_usual(device: str, *tensors: Tensor) -> bool:
    """Return True for tensors that lie as torch's kernels need, outside of autocast and transforms."""
    if torch.is_autocast_enabled(device) or in_transform(*tensors):
        return False
    return device != "cuda" or not any(each.data_ptr() % BYTES for each in tensors)
