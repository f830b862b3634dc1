"""Define the tensors of a call, in the layout of the computation, and the call's options.

Shapes: B batches; H query heads, G key heads; R = H / G query heads, which follow each other, share
a key head; M queries, N keys; K features of queries and keys, E of values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.ops.attention.definition.intervals import Band
from lowtide.ops.attention.definition.masks import AttentionBias


class Operands(NamedTuple):
    """Hold the tensors of a call, in the layout of the computation."""

    query: Tensor  # [B, H, M, K]
    key: Tensor  # [B, G, N, K]
    value: Tensor  # [B, G, N, E]
    bias: Tensor | None = None  # [1 or B, 1 or H, 1 or M, 1 or N]; bool: True takes part
    first: Tensor | None = None  # [M], int32: query i sees the keys first <= j < end (masks.py)
    end: Tensor | None = None  # [M], int32
    seed: Tensor | None = None  # 0-d, int64: dropout's seed

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return the tensors that may need a gradient."""
        return self.query, self.key, self.value, self.bias

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype of scores, statistics and sums: float32, or float64 for float64."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def adds_bias(self) -> bool:
        """Return True if the bias is floating-point, which is added; a bool one hides scores."""
        return self.bias is not None and self.bias.dtype != torch.bool

    @property
    def statistics_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of what forward keeps of each row for backward, [B, H, 2, M].

        The two numbers of a row are the maximum of its scores, and the logarithm of the sum of
        exp(score - maximum). Their sum is the row's logsumexp. They are kept apart, because in the
        sum a large maximum absorbs digits of the logarithm. A maximum of -1e9, which a bias may
        cause, absorbs all of them. A maximum of some hundreds absorbs the last digits, which count
        in a row whose weight lies mostly on one key. For a row that sees no key the maximum is the
        lowest finite number, and the logarithm is -inf.

        "sdpa" has the logsumexp in place of the maximum, and 0 in place of the logarithm.
        """
        B, H, M, _ = self.query.shape
        return B, H, 2, M


class AttentionOptions(NamedTuple):
    """Hold the options of a call."""

    scale: float
    softcap: float = 0.0
    """0 for no soft cap."""
    dropout: float = 0.0
    rows_first: bool = True
    """True if results lie in memory as [B, M, H, E], False if as [B, H, M, E]."""
    backend: str = "auto"
    """"auto" or a backend's name; for the operators "sdpa", "triton" or "torch"."""
    causal: bool = False
    """For "sdpa" in the operators: True if query i sees the keys j <= i. Others get intervals."""
    keep_low: bool = False
    """For "triton" in the operators: True if forward returns the result's low half too."""


class AttentionCall(NamedTuple):
    """Hold one call, in the layout of the computation, before its backend is chosen."""

    operands: Operands
    """The operands, without intervals and seed."""
    mask: AttentionBias | None
    window: Band | None
    options: AttentionOptions
    with_logsumexp: bool = False
    seed: int | Tensor | None = None
    """Dropout's seed; None if the generator draws it."""
    generator: torch.Generator | None = None
    """The generator of the seed; None for torch's default one of the device."""


class AttentionSizes(NamedTuple):
    """Hold the sizes of a call."""

    B: int
    H: int
    G: int
    M: int
    N: int
    K: int
    E: int

    @property
    def R(self) -> int:
        """Return the number of query heads that share a key head."""
        return self.H // self.G if self.G else 1


def sizes(operands: Operands) -> AttentionSizes:
    B, H, M, K = operands.query.shape
    G, N, E = operands.value.shape[1:]
    return AttentionSizes(B, H, G, M, N, K, E)


def allocate_low(out: Tensor) -> Tensor:
    """Return memory for the result's low half, in the strides of the result.

    The low half is the part of the result o that rounding to half precision takes off, in bfloat16.
    Backward computes rowsum(o do) from both halves, where do is the upstream gradient. Without the
    low half, rounding errors would dominate the gradient of a row whose weight lies on one key.
    """
    return torch.empty_like(out, dtype=torch.bfloat16)


def is_far(tensor: Tensor) -> bool:
    """Return True if 128 rows span so many elements that a 32-bit offset would overflow."""
    return 128 * tensor.stride(2) + tensor.shape[3] * tensor.stride(3) >= 1 << 31


def allocate(like: Tensor, shape: Sequence[int], rows_first: bool) -> Tensor:
    """Return memory of the shape [B, H, M, X], which lies in this order or as [B, M, H, X]."""
    B, H, M, X = shape
    if rows_first:
        return like.new_empty(B, M, H, X).transpose(1, 2)
    return like.new_empty(shape)
