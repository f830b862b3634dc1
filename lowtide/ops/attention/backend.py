"""Choose the backend of a call, and say why "auto" passes over the backends that it prefers.

"auto" takes torch's own kernels ("sdpa") if they are known to be right for the call, and the Triton
kernels are not known to be quicker. Otherwise it takes the Triton kernels if they support the call,
and tiles in plain torch if they do not. The choice reads no values of the operands, so `lowtide
doctor` can ask for it with fake tensors.

Shapes: B batches, H heads, M queries, N keys, K features of queries and keys, E of values.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lowtide.core import torch_private
from lowtide.core.autodiff import in_transform
from lowtide.core.checks import HALVES
from lowtide.core.errors import ArgumentError
from lowtide.core.kernels.backend import (
    has_bfloat16_mma,
    has_cudnn_unequal_features,
    has_warpgroup_mma,
    marked_constant,
    reason_against_triton,
)
from lowtide.core.kernels.devices import runs_plain_torch
from lowtide.ops.attention.definition.masks import is_plain_causal
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionSizes, Operands, is_far, sizes
from lowtide.ops.attention.sdpa import alignment

# torch's kernels multiply a causal mask's -inf by the scale, in float32. With a scale of 0 or less
# the result is NaN.
SCALES = torch.finfo(torch.float32)
# The most programs along the second or the third dimension of a CUDA grid.
PROGRAMS = 65535
# The only unequal K and E for which torch has a fast kernel: cuDNN's, for DeepSeek's models. For
# others torch takes its memory-efficient kernel, in at least twice the time of the Triton kernels.
UNEQUAL = (192, 128)
FIRST_CUDNN = 91100
"""The first release of cuDNN whose kernel computes gradients for UNEQUAL."""


# The Triton kernels are quicker than torch's own on an H200 in two cases (decision 0103). One is
# many heads with few queries, keys and features.
MANY_HEADS, SHORT, SHORT_FEATURES = 8192, (64, 128), 64
# The other is few features and many scores. With fewer heads or scores the card is done before the
# host, which takes longer to launch the Triton kernels.
NARROW, MANY_SCORES = 32, 1 << 28
FEWEST_QUERIES, FEWEST_CAUSAL = 32, 512


class BackendChoice(NamedTuple):
    """Hold the backend of a call, and why "auto" passed over the backends that it prefers."""

    backend: str
    """"sdpa", "triton", "torch", "reference", or "higher_order" (the definition in chunks)."""
    against_sdpa: str | None = None
    """None if "sdpa" is taken, or was not considered."""
    against_triton: str | None = None

    @property
    def reason(self) -> str:
        if self.backend == "sdpa":
            return "torch's own kernels compute the same exactly, in O(M) memory"
        if self.backend == "reference":
            return "it is named: all scores at once, O(M N) memory"
        against = {"sdpa": self.against_sdpa, "triton": self.against_triton}
        reasons = [f"not {name}: {reason}" for name, reason in against.items() if reason]
        return "; ".join(reasons) or "it is named"


def choose_backend(call: AttentionCall) -> BackendChoice:
    """Return the backend for this call; raise if a named one cannot run it."""
    operands, named, against_sdpa = call.operands, call.options.backend, None
    if named in ("auto", "sdpa"):
        against_sdpa = reason_against_sdpa(call)
        if against_sdpa is None and named == "auto":
            against_sdpa = _slow_in_torch(call)
        if against_sdpa is None:
            return BackendChoice("sdpa")
        if named == "sdpa":
            raise ArgumentError(f"backend='sdpa' cannot run this call: {against_sdpa}; use backend='auto'")
    if named == "reference":
        return BackendChoice("reference")
    if in_transform(*operands.differentiable):
        return BackendChoice("higher_order", against_sdpa)
    if named == "torch":
        return BackendChoice("torch")
    if named == "auto" and operands.device.type == "cpu":
        return BackendChoice(
            "torch", against_sdpa, "on the CPU Triton's interpreter runs only if it is named"
        )
    against_triton = _reason_against_triton(operands)
    if named == "triton":
        if against_triton is None:
            return BackendChoice("triton")
        raise ArgumentError(
            f"backend='triton' cannot run this call: {against_triton}; use backend='auto' or 'torch'"
        )
    return BackendChoice("triton" if against_triton is None else "torch", against_sdpa, against_triton)


def reason_against_sdpa(call: AttentionCall) -> str | None:
    """Return the reason not to take torch's kernels for the call, or None.

    torch's kernels are not taken if they cannot run the call, are slower, or are not known to be
    right. The checks that take the host longest come last.
    """
    operands, mask, window, options, with_logsumexp, *_ = call
    if torch_private.fused_sdp_choice is None:
        return "this release of torch does not say which of its kernels it would take"
    if with_logsumexp:
        return "it gives no logsumexp"
    if runs_plain_torch(operands.device.type):
        return f"its kernels are not known to be right on {operands.device.type}"
    if options.softcap:
        return "it takes no soft cap"
    if options.dropout:
        return "its dropout depends on the kernel"
    if operands.bias is not None:
        return "lowtide takes every bias itself: torch gives it no gradient, or one as large as all scores"
    if window is not None:
        return "it takes no window"
    size = sizes(operands)
    if mask is not None and not is_plain_causal(mask, size.M, size.N):
        return "it takes no mask but a causal one"
    on_cuda = operands.device.type == "cuda"
    if size.K != size.E and not (on_cuda and (size.K, size.E) == UNEQUAL):
        return "it needs as many features of values as of keys"
    if 0 in size:
        return "it needs something to attend"
    if not SCALES.tiny <= options.scale <= SCALES.max:
        return "its causal masks are nan where the scale is not a normal float32 above 0"
    if in_transform(*operands[:3]):
        return "it supports no transforms"
    if on_cuda:
        return _reason_against_sdpa_on_cuda(operands, size, mask is not None)
    if operands.query.dtype in HALVES:
        return "its kernels for the CPU round sums to half precision"
    if not all(tensor.stride(3) == 1 for tensor in operands[:3]):
        return "it needs features that lie side by side"
    return None


def _reason_against_sdpa_on_cuda(operands: Operands, size: AttentionSizes, causal: bool) -> str | None:
    """Return the reason not to take torch's CUDA kernels for the call, or None."""
    if operands.query.dtype not in HALVES:
        return "its kernels for float32 are less exact"
    if size.K > 256 or size.K % 8:
        return "it takes at most 256 features, a multiple of 8"
    if causal and size.M != size.N:
        return "its causal mask needs as many queries as keys"
    if size.B * size.H > PROGRAMS:
        return f"it is not known to be right for more than {PROGRAMS} heads in all batches"
    reason = alignment.reason_against(*operands[:3])
    if reason is None and size.K != size.E and not _takes_cudnn(operands[:3], causal):
        return "where features of values and keys differ it needs cuDNN, which torch does not take here"
    return reason


def _takes_cudnn(tensors: tuple[Tensor, Tensor, Tensor], causal: bool) -> bool:
    """Return True if torch takes cuDNN's kernel for the unequal features.

    torch cannot be asked about subclasses of Tensor, and a compiled graph asks torch only when it
    runs. In these cases the answer is True if the card has the kernel.
    """
    if not _has_unequal_features(tensors[0].device):
        return False
    if torch.compiler.is_compiling() or any(type(each) is not Tensor for each in tensors):
        return True
    shared = tensors[0].shape[1] != tensors[1].shape[1]
    found = torch_private.fused_sdp_choice(*tensors, is_causal=causal, enable_gqa=shared)
    return found == SDPBackend.CUDNN_ATTENTION.value  # type: ignore[no-any-return]


@marked_constant
def _has_unequal_features(device: torch.device) -> bool:
    """Return True if cuDNN's kernel for UNEQUAL runs on this card, or if no card is there."""
    if not torch.cuda.is_available():
        return True
    return has_cudnn_unequal_features(device, FIRST_CUDNN)


def _slow_in_torch(call: AttentionCall) -> str | None:
    """Return what makes torch's kernels slower than the Triton kernels, or None if nothing does.

    In compiled graphs it is None: each size that is compared would be a guard.
    """
    operands, size = call.operands, sizes(call.operands)
    if torch.compiler.is_compiling() or size.K > SHORT_FEATURES:
        return None
    if operands.device.type != "cuda" or not _is_measured(operands.device):
        return None
    if _reason_against_triton(operands) is not None:
        return None
    heads, (M, N) = size.B * size.H, SHORT
    if heads >= MANY_HEADS and FEWEST_QUERIES <= size.M <= M and size.N <= N:
        return f"its kernels are slow for many heads with at most {M} queries and {N} keys"
    scores, fewest = heads * size.M * size.N, FEWEST_QUERIES
    if call.mask is not None:  # causal: half of the scores are computed
        scores, fewest = scores // 2, FEWEST_CAUSAL
    if size.K <= NARROW and scores >= MANY_SCORES and fewest <= size.M:
        return f"its kernels are slow for at most {NARROW} features"
    return None


@marked_constant
def _is_measured(device: torch.device) -> bool:
    """Return True for a card of the generation that was measured, or if no card is there."""
    return not torch.cuda.is_available() or has_warpgroup_mma(device)


def _reason_against_triton(operands: Operands) -> str | None:
    """Return why the Triton kernels cannot run this call, or None."""
    reason = _reason_against_triton_on(operands.device, operands.query.dtype)
    if reason is None and any(is_far(tensor) for tensor in operands[:3]):
        return "its kernels count within a tile in 32 bits, and a stride is too large for that"
    return reason


@marked_constant
def _reason_against_triton_on(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the Triton kernels cannot run on this device in this dtype, or None."""
    reason = reason_against_triton(device, dtype, "query")
    if reason is None and device.type == "cuda" and not _is_known_to_run(device):
        return "its kernels are for NVIDIA cards from compute capability 8.0 on"
    return reason


@cache
def _is_known_to_run(device: torch.device) -> bool:
    """Return True if the kernels are known to run on this card, or if no card is there.

    Without a card, `lowtide doctor` describes a call that does not run.
    """
    if not torch.cuda.is_available():
        return True
    return has_bfloat16_mma(device)
