"""Define the masks, under the names that xformers gave them.

With each of these masks a query sees one interval of keys (intervals.py). `mask.add_bias(tensor)`
adds a tensor that broadcasts to the scores.

Shapes: M queries, N keys; i counts queries, j keys.
"""

import copy
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from lowtide.core.errors import Absent, ArgumentError, ArgumentTypeError, advises
from lowtide.ops.attention.definition.intervals import (
    Band,
    Intervals,
    VectorCache,
    of_bands,
    rows_of_keys,
    visible,
)

# Advice on how to add several tensors up to one bias; the page that it names has an example.
ONE_TENSOR = (
    "a bool one as bias.masked_fill(~seen, -inf); for an example "
    'see With padding, on the page "Attention with a trained bias" of the documentation'
)
TWO_BIASES = f"this mask has a bias already; add the two tensors first, {ONE_TENSOR}"
BY_ITSELF = "a mask goes to the device of the tensors by itself"
NOTHING = f"pass nothing: {BY_ITSELF}"
# What to write in place of the names that xformers' masks have and these lack.
INSTEAD_OF = {
    "to": f"leave it out: {BY_ITSELF}",
    "make_local_attention": (
        "pass a causal mask, and window=(window_size - 1, 0) beside it; "
        "each sequence must have as many keys as queries"
    ),
    "make_causal_from_bottomright": "pass window=(-1, 0) beside the mask",
    "make_local_attention_from_bottomright": "pass window=(window_size - 1, 0) beside the mask",
    **dict.fromkeys(
        ("from_tensor_lists_qk", "from_tensor_lists_qkv"),
        "call BlockDiagonalMask.from_seqlens(lengths of q, lengths of k), and torch.cat(..., 1) of each list",
    ),
    "q_seqinfo": "read q_starts",
    "k_seqinfo": "read k_starts",
}
# A side of a window that no call reaches; with it, positions are int32.
WIDEST = 1 << 30
# The intervals of masks without sequences are kept here, up to so many queries and keys. Longer
# vectors would hold memory, and take little of their call's time.
LONGEST_KEPT = 1 << 14
_vectors_of_bands = VectorCache()
Place = tuple[VectorCache | None, Hashable]


class AttentionBias:
    """Represent a mask that hides no key; the base class of all masks.

    The mask's tensor may require a gradient, which has the tensor's own shape.
    """

    band = Band()
    bias: Tensor | None = None
    """The mask's tensor: added to the scores (bool: True takes part), broadcast to [B, H, M, N]."""
    made_for: tuple[int, int] | None = None
    """The numbers of queries and keys that the mask is for; None if it is for any."""
    kept_vectors: VectorCache | None = None
    """The intervals and rows of keys that calls have computed; None if the mask keeps none.

    Only a mask whose `blocks` never change may keep them.
    """

    @advises({}, NOTHING, otherwise=NOTHING)
    def __init__(self) -> None:
        pass

    def add_bias(self, bias: Tensor) -> "AttentionBias":
        """Return the same mask with a tensor that is added to the scores.

        Shapes: bias broadcasts to [B, H, M, N]. It is floating-point, or bool, where True takes
        part. It may require a gradient.

        Raises:
            ValueError, TypeError: if the mask has a tensor already, or `bias` is no tensor.
        """
        if not isinstance(bias, Tensor):
            raise ArgumentTypeError(f"bias must be a torch.Tensor, got {type(bias).__name__}")
        if self.bias is not None:
            raise ArgumentError(TWO_BIASES)
        other = copy.copy(self)
        other.bias = bias
        return other

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Return the mask as a dense tensor [..., M, N] to be added to the scores.

        Where a query sees a key, the value is 0 or that of the mask's own bias; elsewhere it is
        -inf. With the dtype torch.bool the tensor is True where a query sees a key. It takes
        O(M N) memory for each leading index.

        Raises:
            ValueError, TypeError: for sizes that the mask is not made for, for an integer dtype, or
                for torch.bool where the mask has a floating-point bias.
        """
        if len(shape) < 2:
            raise ArgumentError(f"shape must end with the numbers of queries and keys, got {tuple(shape)}")
        *_, M, N = shape
        self.check(M, N)
        if dtype == torch.bool and (self.bias is None or self.bias.dtype == torch.bool):
            return self.materialize(shape, torch.float32, device) == 0
        if not dtype.is_floating_point:
            raise ArgumentTypeError(
                f"dtype must be floating-point, or torch.bool without a floating-point bias, got {dtype}"
            )
        dense = torch.zeros(tuple(shape), dtype=dtype, device=device)
        if self.bias is not None:
            bias = self.bias.to(device)
            if bias.dtype == torch.bool:
                dense = dense.masked_fill(~bias, -torch.inf)
            else:
                dense = dense + bias.to(dtype)
        found = intervals(self, None, M, N, torch.device(device))
        return dense if found is None else dense.masked_fill(~visible(found, N), -torch.inf)

    def check(self, M: int, N: int) -> None:
        """Raise if the mask was made for other numbers of queries and keys than M and N."""
        if self.made_for is not None and self.made_for != (M, N):
            queries, keys = self.made_for
            raise ArgumentError(f"attn_bias is made for {queries} queries and {keys} keys, got {M} and {N}")

    def blocks(self, device: torch.device) -> "tuple[Tensor, Tensor] | None":
        """Return where each sequence starts among queries and among keys, and where the last ends.

        Return None for a mask without sequences.
        """
        return None

    def __repr__(self) -> str:
        bias = "" if self.bias is None else f"bias={list(self.bias.shape)}"
        return f"{type(self).__name__}({bias})"


for _name, _instead in INSTEAD_OF.items():
    setattr(AttentionBias, _name, Absent(_name, _instead))


class LowerTriangularMask(AttentionBias):
    """Represent a causal mask: query i sees the keys j <= i."""

    band = Band(right=0)

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        """Return the same mask with a tensor that is added to the scores.

        Shapes and errors are those of :meth:`AttentionBias.add_bias`.
        """
        if self.bias is not None:
            raise ArgumentError(TWO_BIASES)
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Represent a :class:`LowerTriangularMask` and a bias that broadcasts to [B, H, M, N]."""

    def __init__(self, bias: Tensor) -> None:
        if not isinstance(bias, Tensor):
            raise ArgumentTypeError(f"bias must be a torch.Tensor, got {type(bias).__name__}")
        self.bias = bias


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Represent a causal mask that ends at the last key: query i sees the keys j <= i + N - M."""

    band = Band(right=0, from_bottom_right=True)


class LocalAttentionFromBottomRightMask(AttentionBias):
    """Represent a window of keys around each query, counted from the bottom right.

    Query i sees the keys from i + N - M - window_left to i + N - M + window_right. Each side is an
    int of at least 0, or -1 or None for no limit.
    """

    def __init__(self, window_left: int, window_right: int) -> None:
        self.band = window_band((window_left, window_right))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(window_left={self.band.left}, window_right={self.band.right})"


# Masks of sequences whose checks read their class, band and sizes alone; the modules that define
# such classes add them. A subclass, which may check more, is not among them.
BY_SEQUENCES: set[type] = set()
# The masks whose intervals depend on their band and sizes alone.
BY_BAND = {
    AttentionBias,
    LowerTriangularMask,
    LowerTriangularMaskWithTensorBias,
    LowerTriangularFromBottomRightMask,
    LocalAttentionFromBottomRightMask,
}


def likeness(attn_bias: Any) -> Hashable | None:
    """Return a value that is equal only for masks that differ in tensors and sequences alone.

    Return None for what is no tensor, and no mask that its class, band and sizes describe.
    """
    kind: Any = type(attn_bias)
    if attn_bias is None or kind is Tensor or kind is Parameter:
        return (kind,)
    if kind not in BY_BAND and kind not in BY_SEQUENCES:
        return None
    return kind, attn_bias.band, attn_bias.made_for


def is_from_torch(bias: object) -> bool:
    """Return True for a bias of torch's causal_upper_left or causal_lower_right.

    The class is recognised by its name, because importing torch's module takes seconds.
    """
    kind = type(bias)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def from_torch(bias: Any) -> AttentionBias:
    """Return the mask that torch's causal_upper_left or causal_lower_right stands for."""
    upper = bias.variant.name == "UPPER_LEFT"
    mask = LowerTriangularMask() if upper else LowerTriangularFromBottomRightMask()
    mask.made_for = bias.seq_len_q, bias.seq_len_kv
    return mask


def window_band(window: tuple[int | None, int | None]) -> Band:
    """Return the band of a window (left, right), counted from the bottom right corner."""
    for side in window:
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < -1):
            raise ArgumentError(
                f"window must be two ints of at least 0, or -1 or None for no limit: {window}"
            )
    left, right = (None if side is None or side == -1 else min(side, WIDEST) for side in window)
    return Band(left, right, from_bottom_right=True)


def place_of(mask: AttentionBias | None, window: Band | None, M: int, N: int) -> Place:
    """Return where a mask's vectors are kept, or None if they are not, and under which key."""
    if mask is not None and type(mask) not in BY_BAND:
        cache = mask.kept_vectors
    else:
        cache = _vectors_of_bands if max(M, N) <= LONGEST_KEPT else None
    return cache, (M, N, None if mask is None else mask.band, window)


def intervals(
    mask: AttentionBias | None, window: Band | None, M: int, N: int, device: torch.device
) -> Intervals | None:
    """Return the interval of keys that each query sees; None if all queries see all keys.

    It is kept for later calls, as all layers of a model share the mask.
    """
    if mask is None and window is None:
        return None
    bands = [band for band in (None if mask is None else mask.band, window) if band is not None]

    def compute() -> Intervals | None:
        return of_bands(bands, None if mask is None else mask.blocks(device), M, N, device)

    cache, key = place_of(mask, window, M, N)
    return compute() if cache is None else cache.get(("keys", key), device, compute)


def rows_at(place: Place, found: Intervals, N: int) -> tuple[Tensor, Tensor]:
    """Return the rows of keys for these intervals; they are kept where the intervals are."""
    first_M, end_M = found

    def compute() -> tuple[Tensor, Tensor]:
        return rows_of_keys(first_M, end_M, N)

    cache, key = place
    return compute() if cache is None else cache.get(("rows", key), first_M.device, compute)


def is_plain_causal(mask: AttentionBias | None, M: int, N: int) -> bool:
    """Return True if the mask means exactly what torch's is_causal means."""
    if not isinstance(mask, (LowerTriangularMask, LowerTriangularFromBottomRightMask)):
        return False
    left, right, from_bottom_right = mask.band  # a subclass may have another, and sequences
    if mask.bias is not None or (left, right) != (None, 0) or type(mask).blocks is not AttentionBias.blocks:
        return False
    return M == N or not from_bottom_right
