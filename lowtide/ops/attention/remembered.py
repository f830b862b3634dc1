"""Remember calls that torch's own kernels or the Triton kernels took, and run calls like them.

Checking a call and choosing its backend take the host longer than torch's own function. Their
outcome depends on the call's signature: types, shapes, strides, dtypes, devices, options, and
torch's settings. So a call with the signature of an earlier one skips both. The outcome also
depends on addresses, autocast and transforms, which are looked at in each call. It does not depend
on the sequences of a mask, which reach the kernels as tensors.

Shapes: B batches; H heads; M queries; E features of values.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.autodiff import in_transform
from lowtide.ops.attention.definition.masks import AttentionBias
from lowtide.ops.attention.definition.operands import AttentionCall
from lowtide.ops.attention.delegate import SdpaCall
from lowtide.ops.attention.sdpa.alignment import BYTES

if TYPE_CHECKING:
    from lowtide.ops.attention.operator.recorded_call import RecordedCall

Tensors = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query, key, value and bias as the caller has them."""
Signature = tuple[Any, ...]
Results = tuple[Tensor, Tensor | None]
"""The result, and the logsumexp or None if it is not asked for."""


class HandedOn(NamedTuple):
    """Run like calls by torch's own kernels."""

    handed: SdpaCall
    device: str
    """"cpu" or "cuda"."""
    rows_first: bool
    """True if the caller's tensors are [B, M, H, E], False for [B, H, M, E]."""

    def run(self, mask: AttentionBias | None, *tensors: Any) -> Results | None:
        query, key, value, _ = tensors
        if not _are_usual(self.device, query, key, value):
            return None
        if not self.rows_first:
            return self.handed.run(query, key, value), None
        turned = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return self.handed.run(*turned).transpose(1, 2), None


RememberedAttention: TypeAlias = "HandedOn | RecordedCall"
"""Runs like calls: `run` returns the results in the caller's layout, or None for a call that must
be checked."""

# The most calls to remember. At this number all are forgotten. It is reached if sizes change from
# call to call.
MOST = 4096
_calls: dict[Signature, RememberedAttention] = {}


def signature(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, *options: Any
) -> Signature | None:
    """Return all that the checks and the choice of a backend read, or None.

    A remembered call skips both. A call with a tensor that has no sizes or strides (nested or
    sparse) has no signature, nor has one that is compiled.
    """
    if torch.compiler.is_compiling():
        return None
    try:
        of_bias = None
        if bias is not None:
            of_bias = (
                type(bias), bias.shape, bias.stride(), bias.dtype, bias.device, bias.requires_grad,
            )  # fmt: skip
        return (
            options, of_bias, torch_private.sdp_settings(), torch.is_grad_enabled(),
            type(query), query.shape, query.stride(), query.dtype, query.device, query.requires_grad,
            type(key), key.shape, key.stride(), key.dtype, key.device, key.requires_grad,
            type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad,
        )  # fmt: skip
    except (AttributeError, RuntimeError):
        return None


def run(known: Signature | None, mask: AttentionBias | None, *tensors: Any) -> Results | None:
    """Return the results in the caller's layout, or None for a call that is not remembered.

    `tensors` are query, key, value and bias as the caller has them.
    """
    if known is None:  # compiled code would be compiled again when another call is remembered
        return None
    try:
        entry = _calls.get(known)
    except TypeError:  # an option that has no hash
        return None
    return None if entry is None else entry.run(mask, *tensors)


def remember(known: Signature, tensors: Tensors, call: AttentionCall, backend: str) -> None:
    """Remember a call, if its operands are the caller's tensors or transposed views of them."""
    if torch.is_autocast_enabled(call.operands.device.type) or in_transform(*tensors):
        return
    for place, (each, own) in enumerate(zip(tensors, call.operands)):
        if each is None and own is None:
            continue
        if each is None or own is None or 0 in own.shape:
            return
        turned = place < 3 and call.options.rows_first and each.dim() == 4
        given = each.transpose(1, 2) if turned else each
        if given.shape != own.shape or given.stride() != own.stride():
            return
    entry = _entry(tensors, call, backend)
    if entry is None:
        return
    if len(_calls) >= MOST:
        _calls.clear()
    _calls[known] = entry


def _entry(tensors: Tensors, call: AttentionCall, backend: str) -> "RememberedAttention | None":
    operands, device = call.operands, call.operands.device.type
    if backend == "sdpa" and _are_usual(device, *tensors[:3]):
        handed = SdpaCall(operands, call.mask is not None, call.options)
        return HandedOn(handed, device, call.options.rows_first) if handed.is_fused(operands) else None
    known = torch_private.below_autograd is not None
    if backend == "triton" and not call.options.dropout and known:
        from lowtide.ops.attention.operator.recorded_call import RecordedCall  # imports Triton

        return RecordedCall(call)
    return None


def forget() -> None:
    """Forget all calls; needed if something changes that no signature holds."""
    _calls.clear()


def _are_usual(device: str, *tensors: Tensor) -> bool:
    """Return True outside autocast and transforms, if CUDA tensors begin at aligned addresses."""
    if torch.is_autocast_enabled(device) or in_transform(*tensors):
        return False
    return device != "cuda" or not any(each.data_ptr() % BYTES for each in tensors)
