"""Define the shapes of attention's benchmark as data, and the tensors of one shape.

Legend: B batches, H query heads, G key heads; M queries and as many keys N; K features.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.tools.environment import dtype_name

Flags = tuple[
    bool, bool, bool, bool
]  # Which of B, H, M, N a bias has in full; along the others its size is 1.

HALF, SINGLE = torch.bfloat16, torch.float32
BY_QUERY_AND_KEY: Flags = (False, True, True, True)  # [1, H, M, N]
BY_BATCH_AND_KEY: Flags = (True, False, False, True)  # [B, 1, 1, N]
BY_HEAD_AND_KEY: Flags = (False, True, False, True)  # [1, H, 1, N]


class Inputs(NamedTuple):
    """Hold the inputs as a model's projections leave them; each needs a gradient."""

    query: Tensor  # [B, M, H, K]
    key: Tensor  # [B, N, G, K]
    value: Tensor  # [B, N, G, K]
    bias: Tensor | None  # [B or 1, H or 1, M or 1, N or 1]
    upstream: Tensor  # [B, M, H, K]

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        return tuple(each for each in self[:4] if each is not None)


@dataclass(frozen=True)
class AttentionCase:
    name: str
    B: int
    H: int
    M: int
    K: int
    dtype: torch.dtype
    device: str
    G: int = 0
    """0 for as many as H."""
    causal: bool = False
    bias: Flags | None = None
    dropout: float = 0.0
    tf32: bool = False
    """True if torch may round the operands of float32 products to TF32."""
    smoke: bool = False
    by_name: bool = False
    """True for a case that runs only if named."""
    without: tuple[str, ...] = ()
    """Providers that run only if named.

    In these cases only torch's choice of its own kernels matters, and others take long to compile.
    """

    @property
    def key_heads(self) -> int:
        return self.G or self.H

    @property
    def dtype_name(self) -> str:
        return dtype_name(self.dtype)

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        if self.bias is None:
            return None
        sizes = (self.B, self.H, self.M, self.M)
        return tuple(size if full else 1 for size, full in zip(sizes, self.bias))

    @property
    def options(self) -> str:
        """Describe how the case differs from the plain call, in a few words."""
        bias = f"bias {list(self.bias_shape)}" if self.bias_shape else ""
        dropout = f"dropout {self.dropout}" if self.dropout else ""
        words = ("causal" if self.causal else "", bias, dropout, "TF32" if self.tf32 else "")
        return ", ".join(filter(None, words))

    @property
    def shape(self) -> str:
        heads = f"H {self.H}/{self.key_heads}" if self.key_heads != self.H else f"H {self.H}"
        sizes = f"B {self.B} {heads} M {self.M} K {self.K} {self.dtype_name}"
        return f"{sizes}, {self.options or 'plain'}, on {self.device}"

    @property
    def forward_flops(self) -> float:
        """Return the operations of the two products, halved where the mask hides half.

        A backward pass counts as 2.5 of these.
        """
        return 4.0 * self.B * self.H * self.M * self.M * self.K / (2 if self.causal else 1)

    def inputs(self) -> Inputs:
        """Return the inputs, equal in every run, with scores of unit variance."""
        on = {"device": self.device, "generator": torch.Generator(self.device).manual_seed(0)}

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, **on)

        B, M, H, G, K = self.B, self.M, self.H, self.key_heads, self.K
        query, key, value = normal(B, M, H, K), normal(B, M, G, K), normal(B, M, G, K)
        bias = normal(*self.bias_shape) if self.bias_shape else None
        for leaf in (query, key, value, bias):
            if leaf is not None:
                leaf.requires_grad_()
        return Inputs(query, key, value, bias, normal(B, M, H, K))


_cuda = partial(AttentionCase, dtype=HALF, device="cuda")
_cuda_single = partial(AttentionCase, dtype=SINGLE, device="cuda")
_cpu = partial(AttentionCase, dtype=SINGLE, device="cpu")

COMPILED = ("lowtide-triton", "flex")

ATTENTION_CASES = (
    _cuda("plain-64", 4, 16, 4096, 64, without=COMPILED),
    _cuda("plain-128", 1, 16, 16384, 128),
    _cuda("causal-128", 1, 16, 16384, 128, causal=True),
    _cuda("causal-256", 1, 16, 8192, 256, causal=True, without=COMPILED),
    _cuda("bias-scores", 4, 16, 2048, 64, bias=BY_QUERY_AND_KEY),
    _cuda_single("bias-scores-fp32", 4, 16, 2048, 64, bias=BY_QUERY_AND_KEY),
    _cuda("bias-keys", 4, 16, 2048, 64, bias=BY_BATCH_AND_KEY),
    _cuda("causal-512-gqa", 1, 16, 4096, 512, G=4, causal=True),
    _cuda_single("fp32-64", 1, 16, 4096, 64),
    _cuda_single("fp32-128", 1, 16, 4096, 128),
    _cuda_single("tf32-128", 1, 16, 4096, 128, tf32=True),
    _cuda("dropout-128", 4, 16, 4096, 128, dropout=0.1),
    # These three show that memory is linear in M.
    _cuda("quarter-million", 1, 1, 2**18, 64, causal=True, by_name=True),
    _cuda("half-million", 1, 1, 2**19, 64, causal=True, by_name=True),
    _cuda("million", 1, 1, 2**20, 64, causal=True, by_name=True),
    _cuda("smoke-cuda", 1, 2, 256, 64, causal=True, smoke=True),
    _cuda("smoke-cuda-bias", 2, 2, 256, 64, bias=BY_BATCH_AND_KEY, smoke=True),
    _cuda("smoke-cuda-dropout", 1, 2, 256, 64, dropout=0.1, smoke=True),
    _cpu("cpu", 1, 4, 4096, 64),
    _cpu("cpu-causal", 1, 4, 4096, 64, causal=True),
    _cpu("cpu-bias-keys", 1, 4, 4096, 64, bias=BY_HEAD_AND_KEY),
    _cpu("cpu-dropout", 1, 4, 4096, 64, dropout=0.1),
    _cpu("smoke-cpu", 1, 4, 96, 8, G=2, causal=True, smoke=True),
    _cpu("smoke-cpu-bias", 2, 2, 96, 8, bias=BY_BATCH_AND_KEY, smoke=True),
    _cpu("smoke-cpu-dropout", 1, 2, 96, 8, dropout=0.1, smoke=True),
)
