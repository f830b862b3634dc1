"""What is computed: the tensors of a call, brought into one layout, and its options.

Shapes: B batches; H query heads, G key heads, R = H / G query heads to a key head (they follow each other);
M queries, N keys; K features of queries and keys, E of values.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Operands(NamedTuple):
    query: Tensor  # [B, H, M, K]
    key: Tensor  # [B, G, N, K]
    value: Tensor  # [B, G, N, E]
    bias: Tensor | None = None  # [1 or B, 1 or H, 1 or M, 1 or N]; bool: True takes part
    first: Tensor | None = None  # [M], int32: query i sees the keys first <= j < end (masks.py)
    end: Tensor | None = None  # [M], int32
    seed: Tensor | None = None  # 0-d, int64: of dropout

    @property
    def differentiable(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What may need a gradient."""
        return self.query, self.key, self.value, self.bias

    @property
    def device(self) -> torch.device:
        return self.query.device

    @property
    def sum_dtype(self) -> torch.dtype:
        """Of scores, statistics and sums: float32, or float64 for float64."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def adds_bias(self) -> bool:
        """Whether the bias is one of floating-point numbers, and not of what takes part."""
        return self.bias is not None and self.bias.dtype != torch.bool

    @property
    def statistics_shape(self) -> tuple[int, int, int, int]:
        """[B, H, 1 or 2, M], of what forward keeps of each row for backward: two numbers whose sum is its
        logsumexp, the maximum of its scores and the logarithm of the sum of what their exponentials are then.
        In one number a maximum of -1e9, as a bias may make it, would swallow the logarithm; where there is
        no such bias, one is enough. A row that sees nothing keeps the lowest number, and -inf."""
        B, H, M, _ = self.query.shape
        return B, H, 2 if self.adds_bias else 1, M


class Options(NamedTuple):
    scale: float
    softcap: float = 0.0
    """0 for none."""
    dropout: float = 0.0
    rows_first: bool = True
    """Whether results lie in memory as [B, M, H, E], or as [B, H, M, E]."""
    backend: str = "auto"
    """"auto" or the name of one; to the operators "sdpa", "triton" or "torch" (engines.chosen)."""
    causal: bool = False
    """Of "sdpa", to the operators: whether query i sees the keys j <= i. Others have that as intervals."""


class Sizes(NamedTuple):
    B: int
    H: int
    G: int
    M: int
    N: int
    K: int
    E: int

    @property
    def R(self) -> int:
        return self.H // self.G if self.G else 1


def sizes(operands: Operands) -> Sizes:
    B, H, M, K = operands.query.shape
    G, N, E = operands.value.shape[1:]
    return Sizes(B, H, G, M, N, K, E)


def is_far(tensor: Tensor) -> bool:
    """Whether the elements of 128 rows lie further apart than 32 bits can say."""
    return 128 * tensor.stride(2) + tensor.shape[3] * tensor.stride(3) >= 1 << 31
