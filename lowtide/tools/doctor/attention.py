"""Tell which backend computes a call of attention, and why, from its description alone.

Tensors without data go to the functions that choose at run time (lowtide.ops.attention.dispatch).

Shapes: B batches; H query heads, G key heads; M queries, N keys; K features of queries and keys, E
of values.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide import attn_bias
from lowtide.core.errors import ArgumentError
from lowtide.ops.attention import aligned, dispatch
from lowtide.ops.attention.backend import BackendChoice
from lowtide.ops.attention.definition import layouts
from lowtide.ops.attention.definition.operands import AttentionCall, AttentionOptions, Operands
from lowtide.ops.attention.definition.validation import check_backend, check_numbers, check_window


class Mask(str, Enum):
    CAUSAL = "causal"
    CAUSAL_FROM_BOTTOM_RIGHT = "causal-from-bottom-right"
    BLOCKS = "blocks"
    CAUSAL_BLOCKS = "causal-blocks"

    def of(self, M: int, N: int) -> attn_bias.AttentionBias:
        """Return this mask, with a single sequence where several are possible."""
        if self is Mask.CAUSAL:
            return attn_bias.LowerTriangularMask()
        if self is Mask.CAUSAL_FROM_BOTTOM_RIGHT:
            return attn_bias.LowerTriangularFromBottomRightMask()
        kind = attn_bias.BlockDiagonalMask if self is Mask.BLOCKS else attn_bias.BlockDiagonalCausalMask
        return kind.from_seqlens((M,), (N,))


class Layout(str, Enum):
    BMHK = "BMHK"
    BMK = "BMK"
    BMGHK = "BMGHK"
    BHMK = "BHMK"


@dataclass(frozen=True)
class AskedAttentionCall:
    """Describe a call of memory_efficient_attention.

    With the layout BHMK this is a call of scaled_dot_product_attention instead.
    """

    B: int = 1
    M: int = 4096
    N: int | None = None
    """None means M; likewise, None means H for G, and K for E."""
    H: int = 16
    G: int | None = None
    K: int = 64
    E: int | None = None
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    layout: Layout = Layout.BMHK
    mask: Mask | None = None
    bias: tuple[int, ...] | None = None
    """The bias's shape."""
    bias_gradient: bool = True
    dropout: float = 0.0
    softcap: float | None = None
    window: tuple[int, int] | None = None
    with_logsumexp: bool = False
    backend: str = "auto"

    def choice(self) -> BackendChoice:
        """Return the backend and why; raise any error that the call itself would raise."""
        check_numbers(self.dropout, None, self.softcap)
        check_backend(self.backend)
        band = check_window(self.window)
        N = self.M if self.N is None else self.N
        K, E = self.K, self.K if self.E is None else self.E
        step = math.gcd(aligned.VECTOR, K, E)
        if self.device == "cuda" and aligned.is_slow(step, self.dtype, self.M, N):
            K, E = aligned.padded(K), aligned.padded(E)
        options = AttentionOptions(1.0, self.softcap or 0.0, self.dropout, backend=self.backend)
        mask = self.mask.of(self.M, N) if self.mask else None
        with FakeTensorMode(), torch.no_grad():
            query = self._tensor(self.M, self.H, K)
            key, value = (self._tensor(N, self._key_heads, features) for features in (K, E))
            bias = None if self.bias is None else torch.empty(self.bias, dtype=self.dtype)
            if self.layout is Layout.BHMK:
                _, *own = layouts.from_torch(query, key, value, bias, enable_gqa=True)
            else:
                _, *own = layouts.from_xformers(query, key, value, bias)
            operands = Operands(*(None if each is None else self._there(each) for each in own))
            if operands.bias is not None:
                operands.bias.requires_grad_(self.bias_gradient)
            return dispatch.choose(AttentionCall(operands, mask, band, options, self.with_logsumexp))

    @property
    def _key_heads(self) -> int:
        return self.H if self.G is None else self.G

    def _tensor(self, length: int, heads: int, features: int) -> Tensor:
        if self.layout is Layout.BMK and heads != 1:
            raise ArgumentError(f"heads must be 1 in the layout BMK, got {heads}")
        groups = max(self._key_heads, 1)
        shapes = {
            Layout.BMHK: (length, heads, features),
            Layout.BMK: (length, features),
            Layout.BMGHK: (length, groups, heads // groups, features),
            Layout.BHMK: (heads, length, features),
        }
        return torch.empty(self.B, *shapes[self.layout], dtype=self.dtype)

    def _there(self, tensor: Tensor) -> Tensor:
        """Return a tensor like this on the device, which this machine may lack.

        torch makes no views of a tensor on a device that is missing.
        """
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self.device)


# The lines of the table in docs/reference/ways.md, and how each differs from AskedAttentionCall().
_CAUSAL: dict[str, Any] = {"mask": Mask.CAUSAL}
_PLAIN: tuple[dict[str, Any], ...] = ({}, _CAUSAL, {"K": 512}, {"K": 20}, {**_CAUSAL, "N": 8192})
LINES: dict[str, tuple[dict[str, Any], ...]] = {
    "no bias, no mask or a causal one; bfloat16 or float16": (
        *({}, _CAUSAL, {"mask": Mask.CAUSAL_FROM_BOTTOM_RIGHT}),
        *({"dtype": torch.float16}, {"dtype": torch.float16, **_CAUSAL}),
        *({"K": 256}, {"G": 4}, {"layout": Layout.BHMK}),
    ),
    "the same on Hopper, K at most 32 and many scores": (
        *({"K": 32}, {"K": 8, "B": 2, **_CAUSAL}, {"K": 32, "G": 4, "dtype": torch.float16}),
    ),
    "the same on Hopper, many heads, M 32 to 64, N at most 128, K 64": (
        *({"B": 512, "M": 64, "K": 64}, {"B": 1024, "M": 49, "K": 40, **_CAUSAL}),
        {"B": 512, "M": 32, "N": 128, "G": 4, "K": 64},
    ),
    "the same, K 192 and E 128 on Hopper": (
        *({"K": 192, "E": 128}, {"K": 192, "E": 128, **_CAUSAL}),
        {"K": 192, "E": 128, "G": 4, "dtype": torch.float16},
    ),
    "the same, K above 256": ({"K": 512}, {"K": 260}),
    "the same, K no multiple of 8": ({"K": 75}, {"K": 100}),
    "the same, causal with M ≠ N": ({**_CAUSAL, "N": 2048}, {**_CAUSAL, "N": 8192}),
    "any of these, float32": tuple({"dtype": torch.float32, **case} for case in _PLAIN),
    "any of these, float64": tuple({"dtype": torch.float64, **case} for case in _PLAIN),
    "a bias of any shape, with a gradient or without": (
        {"bias": (1, 16, 4096, 4096)},
        {"bias": (1, 1, 1, 4096), "bias_gradient": False},
        {"bias": (1, 1, 1, 4096), "dtype": torch.float32, **_CAUSAL},
    ),
    "any other mask, or a window": (
        {"mask": Mask.BLOCKS},
        {"mask": Mask.CAUSAL_BLOCKS},
        {"mask": Mask.CAUSAL_FROM_BOTTOM_RIGHT, "N": 8192},
        {"window": (128, 0)},
        {"window": (128, -1), **_CAUSAL},
    ),
    "dropout, a soft cap": ({"dropout": 0.1}, {"softcap": 30.0}, {"softcap": 30.0, "dtype": torch.float32}),
    "the logsumexp": ({"with_logsumexp": True}, {"with_logsumexp": True, **_CAUSAL}),
    "K ≠ E otherwise": ({"E": 128}, {"E": 128, **_CAUSAL}),
    "any of the last five, float64": (
        {"dtype": torch.float64, "bias": (1, 16, 1, 4096)},
        {"dtype": torch.float64, "window": (128, 0)},
        {"dtype": torch.float64, "dropout": 0.1},
        {"dtype": torch.float64, "with_logsumexp": True},
        {"dtype": torch.float64, "E": 128},
    ),
}


def table() -> list[tuple[str, str, str]]:
    """Return a line for each call, with its backends on the CPU and on CUDA."""
    return [(call, _names(cases, "cpu"), _names(cases, "cuda")) for call, cases in LINES.items()]


def _names(cases: tuple[dict[str, Any], ...], device: str) -> str:
    found = {AskedAttentionCall(device=device, **case).choice().backend: None for case in cases}
    return " or ".join(found)
