"""Define the shapes of attention's benchmark as data, and the tensors of one shape.

Legend: B batches, H query heads, G key heads; M queries, N keys; K features of queries and keys, E
of values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.tools.environment import dtype_name

# True for each of B, H, M, N that a bias has in full; its other sizes are 1.
Flags = tuple[bool, bool, bool, bool]

HALF, SINGLE = torch.bfloat16, torch.float32
BY_QUERY_AND_KEY: Flags = (False, True, True, True)  # [1, H, M, N]
BY_BATCH_AND_KEY: Flags = (True, False, False, True)  # [B, 1, 1, N]
BY_HEAD_AND_KEY: Flags = (False, True, False, True)  # [1, H, 1, N]


class Inputs(NamedTuple):
    """Hold the inputs as a model's projections leave them."""

    query: Tensor  # [B, M, H, K]
    key: Tensor  # [B, N, G, K]
    value: Tensor  # [B, N, G, E]
    bias: Tensor | None  # [B or 1, H or 1, M or 1, N or 1]
    upstream: Tensor  # [B, M, H, E]
    sink: Tensor | None = None  # [H], a score that every query has beside those of its keys

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Return the tensors that need a gradient."""
        return tuple(each for each in (*self[:4], self.sink) if each is not None and each.requires_grad)


Attention = Callable[[Inputs], Tensor]
"""An implementation on one case: of its inputs, the result [B, M, H, E]."""


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
    """Query i sees the keys j <= i + N - M."""
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
    N: int = 0
    """0 for as many as M; in the same way E defaults to K."""
    E: int = 0
    bias_gradient: bool = True
    softcap: float | None = None
    window: tuple[int, int] | None = None
    """Query i sees the keys from i + N - M - left to i + N - M + right; -1 is no limit."""
    lengths: tuple[int, ...] = ()
    """Sequences one after the other in a batch of one; a query sees the keys of its own."""
    padded: bool = False
    """True if keys of a batch are padding: from half of them to none, batch by batch."""
    sinks: bool = False
    inference: bool = False
    """True for a forward pass alone, without gradients."""

    @property
    def key_heads(self) -> int:
        return self.G or self.H

    @property
    def keys(self) -> int:
        return self.N or self.M

    @property
    def value_features(self) -> int:
        return self.E or self.K

    @property
    def bias_shape(self) -> tuple[int, ...] | None:
        if self.bias is None:
            return None
        sizes = (self.B, self.H, self.M, self.keys)
        return tuple(size if full else 1 for size, full in zip(sizes, self.bias))

    @property
    def results(self) -> tuple[str, ...]:
        """Return the names of what a step computes, in the order of its results."""
        if self.inference:
            return ("out",)
        gradients = ("grad_query", "grad_key", "grad_value")
        bias = ("grad_bias",) if self.bias and self.bias_gradient else ()
        return ("out", *gradients, *bias, *(("grad_sink",) if self.sinks else ()))

    @property
    def options(self) -> str:
        """Describe how the case differs from the plain call, in a few words."""
        constant = "" if self.bias_gradient else " without gradient"
        words = (
            "causal" if self.causal else "",
            f"{len(self.lengths)} sequences" if self.lengths else "",
            f"window {self.window}" if self.window else "",
            f"bias {list(self.bias_shape)}{constant}" if self.bias_shape else "",
            "padded keys" if self.padded else "",
            f"soft cap {self.softcap:g}" if self.softcap else "",
            "sinks" if self.sinks else "",
            f"dropout {self.dropout}" if self.dropout else "",
            "forward alone" if self.inference else "",
            "TF32" if self.tf32 else "",
        )
        return ", ".join(filter(None, words))

    @property
    def sizes(self) -> str:
        heads = f"H {self.H}/{self.key_heads}" if self.key_heads != self.H else f"H {self.H}"
        keys = f" N {self.keys}" if self.keys != self.M else ""
        features = f" E {self.value_features}" if self.value_features != self.K else ""
        return f"B {self.B} {heads} M {self.M}{keys} K {self.K}{features}"

    @property
    def shape(self) -> str:
        return f"{self.sizes} {dtype_name(self.dtype)}, {self.options or 'plain'}, on {self.device}"

    @property
    def forward_flops(self) -> float:
        """Return the operations of the two products, on the scores that take part.

        A backward pass counts as 2.5 of these.
        """
        return 2.0 * self.B * self.H * self.pairs * (self.K + self.value_features)

    @property
    def pairs(self) -> float:
        """Return the scores of a head that take part, in the mean over batches.

        Of a causal mask's last diagonal half is counted, so that it halves a square.
        """
        at_M = torch.arange(self.M)
        first_M, end_M = torch.zeros_like(at_M), torch.full_like(at_M, self.keys)
        if self.lengths:
            end_M = torch.repeat_interleave(torch.tensor(self.lengths).cumsum(0), torch.tensor(self.lengths))
            first_M = end_M - torch.repeat_interleave(torch.tensor(self.lengths), torch.tensor(self.lengths))
        left, right = self.band
        own_M = at_M + self.keys - self.M
        if left is not None:
            first_M = torch.maximum(first_M, own_M - left)
        if right is not None:
            end_M = torch.minimum(end_M, own_M + right + 1)
        seen = (end_M - first_M).clamp_min(0).sum().item() - (self.M / 2 if self.causal else 0)
        return seen * (sum(self.valid_keys) / (self.B * self.keys) if self.padded else 1)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """Return how far to the left and right of its own key a query sees; None is no limit."""
        limits = [(-1, 0)] * self.causal + [self.window] * (self.window is not None)
        left, right = ([side for side in sides if side >= 0] for sides in zip((-1, -1), *limits))
        return min(left, default=None), min(right, default=None)

    @property
    def valid_keys(self) -> tuple[int, ...]:
        """Return the number of keys of each batch that are no padding."""
        N, half = self.keys, self.keys // 2
        return tuple(half + (N - half) * (b + 1) // self.B for b in range(self.B))

    def rule(self) -> Callable[[Any, Any], Any] | None:
        """Return the function of i and j that says whether query i sees key j; None if all do.

        Padding is not part of it.
        """
        (left, right), offset, sequence_M = self.band, self.keys - self.M, None
        if self.lengths:
            lengths = torch.tensor(self.lengths, device=self.device)
            sequence_M = torch.arange(len(lengths), device=self.device).repeat_interleave(lengths)
        if left is None and right is None and sequence_M is None:
            return None

        def sees(i: Any, j: Any) -> Any:
            own = i + offset
            seen = j >= 0 if sequence_M is None else sequence_M[i] == sequence_M[j]
            if left is not None:
                seen = seen & (j >= own - left)
            return seen if right is None else seen & (j <= own + right)

        return sees

    def keep(self) -> Tensor | None:
        """Return where keys are no padding, bool [B, 1, 1, N]; None without padding."""
        if not self.padded:
            return None
        valid_B = torch.tensor(self.valid_keys, device=self.device)
        return torch.arange(self.keys, device=self.device) < valid_B[:, None, None, None]

    def seen(self, rows: slice = slice(None)) -> Tensor | None:
        """Return the keys that these queries see, bool [B or 1, 1, m, N]; None if they see all."""
        rule, keep = self.rule(), self.keep()
        if rule is None:
            return keep
        at_M, at_N = (torch.arange(size, device=self.device) for size in (self.M, self.keys))
        shown = rule(at_M[rows, None], at_N)[None, None]
        return shown if keep is None else shown & keep  # type: ignore[no-any-return]

    def inputs(self) -> Inputs:
        """Return the inputs, equal in every run, with scores of unit variance."""
        on = {"device": self.device, "generator": torch.Generator(self.device).manual_seed(0)}

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, **on)

        B, M, N, H, G, K, E = self.B, self.M, self.keys, self.H, self.key_heads, self.K, self.value_features
        query, key, value = normal(B, M, H, K), normal(B, N, G, K), normal(B, N, G, E)
        bias = normal(*self.bias_shape) if self.bias_shape else None
        upstream = normal(B, M, H, E)
        sink = normal(H) if self.sinks else None
        for leaf in (query, key, value, sink, *([bias] if self.bias_gradient else [])):
            if leaf is not None and not self.inference:
                leaf.requires_grad_()
        return Inputs(query, key, value, bias, upstream, sink)


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
