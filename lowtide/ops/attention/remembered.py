"""Remember which calls torch's own kernels take, so that one alike is handed on by a single check.

Checking and choosing take the host longer than torch's own function. Their answer depends on what a
signature holds (types, shapes, strides, dtypes, devices and options), and on addresses, autocast
and transforms. These are looked at in each call.

Shapes: B batches; H heads, M queries; E features of values.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.core.autodiff import in_transform
from lowtide.ops.attention import delegate
from lowtide.ops.attention.definition.operands import AttentionCall, Operands, Options
from lowtide.ops.attention.sdpa.alignment import BYTES

Tensors = tuple[Tensor, Tensor, Tensor]
PLAIN = (Tensor, Parameter)
# All are forgotten where there are so many, as with sizes that change from call to call.
MOST = 4096
_calls: dict[tuple[Any, ...], tuple[Options, bool]] = {}


class Known(NamedTuple):
    """Hold what tells a call from others, and its tensors in the caller's layout."""

    signature: tuple[Any, ...]
    """An option stands beside its type, since True equals 1."""
    tensors: Tensors


def known_call(tensors: Tensors, *options: Any) -> Known | None:
    """Return what a call is remembered by, or None for one that is not."""
    if torch.compiler.is_compiling():
        return None
    found = [*options, *map(type, options)]
    for each in tensors:
        if type(each) not in PLAIN or each.layout is not torch.strided or each.is_nested:
            return None
        found += each.shape, each.stride(), each.dtype, each.device
    return Known(tuple(found), tensors)


def hand_on(known: Known | None) -> Tensor | None:
    """Return the result in the caller's layout, or None for a call that is not remembered."""
    if known is None:
        return None
    try:
        call = _calls.get(known.signature)
    except TypeError:  # an option that has no hash
        return None
    if call is None or not _are_usual(known.tensors):
        return None
    options, causal = call
    if not options.rows_first:
        return delegate.attention(Operands(*known.tensors), causal, options)
    query, key, value = known.tensors
    operands = Operands(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return delegate.attention(operands, causal, options).transpose(1, 2)


def remember(known: Known | None, call: AttentionCall, backend: str) -> None:
    """Remember a call if torch's kernels take its tensors as they are, or transposed."""
    if known is None or backend != "sdpa" or not _are_usual(known.tensors):
        return
    for each, own in zip(known.tensors, call.operands):
        turned = each.transpose(1, 2) if call.options.rows_first and each.dim() == 4 else each
        if own is None or turned.shape != own.shape or turned.stride() != own.stride():
            return
    if len(_calls) >= MOST:
        _calls.clear()
    _calls[known.signature] = call.options, call.mask is not None


def _are_usual(tensors: Tensors) -> bool:
    """Return True for tensors that lie as torch's kernels need, outside of autocast and transforms."""
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device) or in_transform(*tensors):
        return False
    return device != "cuda" or not any(each.data_ptr() % BYTES for each in tensors)
