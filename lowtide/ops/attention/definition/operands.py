"""Define what is computed: the tensors of a call, in one layout, and its options.

Shapes: B batches; H query heads, G key heads, R = H / G query heads to a key head (they follow each
other); M queries, N keys; K features of queries and keys, E of values.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.ops.attention.definition.masks import AttentionBias, Band


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
        """Return True if the bias is floating-point, and so added; a bool bias hides scores."""
        return self.bias is not None and self.bias.dtype != torch.bool

    @property
    def statistics_shape(self) -> tuple[int, int, int, int]:
        """Return the shape of what forward keeps of each row for backward, [B, H, 2, M].

        The row's logsumexp is the sum of the two numbers: the maximum of the scores, and the
        logarithm of the sum of exp(score - maximum). In one number, a maximum of -1e9, as a bias
        may make it, would absorb the logarithm; and one of some hundreds its last digits, which are
        those of the weight of a confident row. For a row that sees no key the maximum is the lowest
        number and the logarithm is -inf.
        """
        B, H, M, _ = self.query.shape
        return B, H, 2, M


class AttentionOptions(NamedTuple):
    """Hold the options of a call."""

    scale: float
    softcap: float = 0.0
    """0 for none."""
    dropout: float = 0.0
    rows_first: bool = True
    """True if results lie in memory as [B, M, H, E], False for [B, H, M, E]."""
    backend: str = "auto"
    """"auto" or a backend's name; for the operators "sdpa", "triton" or "torch"."""
    causal: bool = False
    """For the operators' "sdpa" alone: query i sees the keys j <= i. Others get intervals."""
    keep_low: bool = False
    """For the operators' "triton" alone: forward returns the result's low half too."""


class AttentionCall(NamedTuple):
    """Hold one call, in the layout of the computation, before its backend is chosen."""

    operands: Operands
    """Without intervals and seed."""
    mask: AttentionBias | None
    window: Band | None
    options: AttentionOptions
    with_logsumexp: bool = False
    seed: int | Tensor | None = None
    """Dropout's seed; None if the generator, or torch's default one, draws it."""
    generator: torch.Generator | None = None


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
        """Return the number of query heads to a key head."""
        return self.H // self.G if self.G else 1


def sizes(operands: Operands) -> AttentionSizes:
    B, H, M, K = operands.query.shape
    G, N, E = operands.value.shape[1:]
    return AttentionSizes(B, H, G, M, N, K, E)


def allocate_low(out: Tensor) -> Tensor:
    """Return memory for the result's low half, in the strides of the result.

    That is what rounding to half precision takes off the result, in bfloat16. Backward forms
    rowsum(o do) of both halves, or its rounding would be most of the gradient of a row whose weight
    lies on one key.
    """
    return torch.empty_like(out, dtype=torch.bfloat16)


def is_far(tensor: Tensor) -> bool:
    """Return True if the elements of 128 rows lie further apart than 32 bits can express."""
    return 128 * tensor.stride(2) + tensor.shape[3] * tensor.stride(3) >= 1 << 31


def allocate(like: Tensor, shape: Sequence[int], rows_first: bool) -> Tensor:
    """Return memory for [B, H, M, X], in this order or as [B, M, H, X]."""
    B, H, M, X = shape
    if rows_first:
        return like.new_empty(B, M, H, X).transpose(1, 2)
    return like.new_empty(shape)
