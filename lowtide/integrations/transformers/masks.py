"""Define the masks that a model of Transformers hands to its layers.

A mask is a few numbers in place of a tensor [B, 1, M, N].

Shapes: B sequences, M queries, N keys; i counts queries, j keys.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from lowtide.core.errors import ArgumentError
from lowtide.integrations.transformers.bands import Shown, band
from lowtide.ops.attention.definition.block_diagonal import BlockDiagonalCausalMask
from lowtide.ops.attention.definition.intervals import Band
from lowtide.ops.attention.definition.masks import BY_SEQUENCES, AttentionBias, LowerTriangularMask

ELSE = "attn_implementation='lowtide' makes no tensor for such; use 'sdpa' or 'eager' with this model"
ELEMENTS = 1 << 22
"""The most elements of a mask that are examined at a time."""
# Transformers 4 lacks the bidirectional mask. `register_attention` refuses that version, and the
# callback uses no masks.
PLAIN = tuple(
    getattr(masking_utils, f"{name}_mask_function")
    for name in ("causal", "bidirectional")
    if hasattr(masking_utils, f"{name}_mask_function")
)


class DenseMaskWarning(UserWarning):
    """Warn that a mask of [B, 1, M, N] has been made."""


class OpaqueMask:
    """Represent a mask on its way from a model to its layers; models must not compute with it."""

    ndim = 4
    """Tells Transformers that the mask is made: for a static cache `generate` makes it."""

    lengths: tuple[int, int]

    @property
    def shape(self) -> tuple[None, int, int, int]:
        """Return the shape, for models that derive a mask from it; the batch size is unknown."""
        return (None, 1, *self.lengths)

    def contiguous(self) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"this model asks its mask for its {name}; {ELSE}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: object) -> Any:
        raise ArgumentError(f"this model computes {function.__name__} of its mask; {ELSE}")


class ModelsMask(OpaqueMask, AttentionBias):
    """Represent a band, and which keys take part in it."""

    def __init__(self, M: int, N: int, left: int | None, right: int | None, keys: Tensor | None) -> None:
        self.lengths, self.band = (M, N), Band(left, right)
        self.bias = keys  # [B, 1, 1, N], bool

    def check(self, M: int, N: int) -> None:
        if self.lengths != (M, N):
            raise ArgumentError(
                f"this layer has {M} queries and {N} keys, its mask was made for {self.lengths[0]} and "
                f"{self.lengths[1]}; {ELSE}"
            )

    def __getitem__(self, index: Any) -> "ModelsMask":
        """Return [:, :, rows, :keys], which some models take to drop queries; refuse others."""
        M, N = self.lengths
        if isinstance(index, tuple) and len(index) == 4 and all(isinstance(each, slice) for each in index):
            first, end, step = index[2].indices(M)
            first_key, keys, key_step = index[3].indices(N)
            whole = index[0] == index[1] == slice(None) and step == key_step == 1
            if whole and first < end and first_key == 0:
                shown = Shown(self.band.left, self.band.right)
                padding = None if self.bias is None else self.bias[..., :keys]
                return _banded(shown, first, end - first, keys, padding)
        raise ArgumentError(f"this model takes a part of its mask; {ELSE}")


class CausalMask(ModelsMask, LowerTriangularMask):
    """Show each query i the keys j <= i."""


class DenseMask(ModelsMask):
    """Represent any other mask, with one bool for each query and key.

    Models must not add this mask to their scores: that would add 1 instead of hiding a key.
    """

    def __init__(self, seen: Tensor) -> None:  # [B, 1, M, N], bool
        M, N = seen.shape[-2:]
        super().__init__(M, N, None, None, seen)

    def __getitem__(self, index: Any) -> "DenseMask":
        if isinstance(index, tuple) and len(index) == 4 and all(isinstance(each, slice) for each in index):
            return DenseMask(self.bias[index])  # type: ignore[index]
        raise ArgumentError(f"this model takes a part of its mask; {ELSE}")


class PackedMask(OpaqueMask, BlockDiagonalCausalMask):
    """Represent several sequences in each row of the batch, with the rows joined into one."""

    def __init__(self, lengths: list[int], window: int | None, M: int) -> None:
        super().__init__(lengths, lengths)
        self.lengths = (M, M)
        self.band = Band(None if window is None else window - 1, 0)


BY_SEQUENCES.add(PackedMask)


def mask(
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | ModelsMask | PackedMask | None = None,
    **sizes: Any,
) -> ModelsMask | PackedMask:
    """Return the mask of one kind of layer; Transformers calls this.

    `mask_function` tells which keys query i sees. A band (causal, a window, all) becomes two
    numbers, and padding adds [B, 1, 1, N]. Several sequences in a row become their lengths. A
    single query becomes [B, 1, 1, N]. Anything else becomes [B, 1, M, N], with a warning.
    """
    if isinstance(attention_mask, ModelsMask | PackedMask):
        return attention_mask
    plain = mask_function in PLAIN
    if torch.compiler.is_compiling() and attention_mask is None and not plain:
        return _uncompiled(mask_function, attention_mask, **sizes)
    return _mask(mask_function, attention_mask, **sizes)


def _mask(
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,  # [B, keys], bool: True for a key that takes part
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: object,
) -> ModelsMask | PackedMask:
    M, N = q_length, kv_length
    compiling = torch.compiler.is_compiling()
    if isinstance(q_offset, Tensor) and M > 1 and not compiling:  # A static cache has a tensor.
        q_offset = int(q_offset)
    if isinstance(q_offset, int) and (shown := band(mask_function)) is not None:
        return _banded(shown, q_offset - kv_offset, M, N, _padding(attention_mask, kv_offset, N))

    def rows(first: int, count: int) -> Tensor:  # [B, 1, count, N]
        dense = sdpa_mask(
            batch_size=batch_size,
            q_length=count,
            kv_length=N,
            q_offset=q_offset + first,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        assert dense is not None
        return dense

    if M > 1 and not compiling:
        if M == N and (lengths := _packed(rows, batch_size, M, local_size)) is not None:
            return PackedMask(lengths, local_size, M)
        warnings.warn(
            f"this model's mask is neither causal, nor a window, nor several sequences in a row: it is made, "
            f"[{batch_size}, 1, {M}, {N}] bool, as by attn_implementation='sdpa'",
            DenseMaskWarning,
            stacklevel=2,
        )
    return DenseMask(rows(0, M))


_uncompiled = torch.compiler.disable(
    _mask,
    reason="whether there are several sequences in a row is in the numbers of position_ids; with an "
    "attention_mask (of ones) there are none, and one graph is made",
)


def _banded(shown: Shown, shift: int, M: int, N: int, keys: Tensor | None) -> ModelsMask:
    """Return the mask of a band where query i stands at key i + shift.

    A limit that the shape implies is dropped.
    """
    left = None if shown.left is None or shown.left - shift >= M - 1 else shown.left - shift
    right = None if shown.right is None or shown.right + shift >= N - 1 else shown.right + shift
    kind = CausalMask if (left, right) == (None, 0) else ModelsMask
    return kind(M, N, left, right, keys)


def _padding(attention_mask: Tensor | None, kv_offset: int, N: int) -> Tensor | None:  # [B, 1, 1, N]
    if attention_mask is None:
        return None
    keys_BN = attention_mask[:, kv_offset : kv_offset + N]
    # A cache that is not full yet has fewer keys.
    keys_BN = torch.nn.functional.pad(keys_BN, (0, N - keys_BN.shape[1]))
    if not torch.compiler.is_compiling() and keys_BN.all():
        return None
    return keys_BN[:, None, None]


def _packed(rows: Callable[[int, int], Tensor], B: int, M: int, window: int | None) -> list[int] | None:
    """Return the lengths of the sequences, or None if the mask has any other structure.

    All rows are examined, a few at a time.
    """
    begins, latest_B1 = [], None
    step = max(1, ELEMENTS // (B * M))
    for first in range(0, M, step):
        seen_BmM = rows(first, min(step, M - first))[:, 0]
        j_M = torch.arange(M, device=seen_BmM.device)
        i_m = j_M[first : first + step]
        before_m = (i_m - 1).clamp_min(0)[None, :, None].expand(B, -1, 1)
        begins_Bm = ~seen_BmM.gather(2, before_m)[..., 0] | (i_m == 0)
        start_Bm = torch.where(begins_Bm, i_m, 0).cummax(1).values
        start_Bm = start_Bm if latest_B1 is None else start_Bm.maximum(latest_B1)
        expected_BmM = (j_M >= start_Bm[..., None]) & (j_M <= i_m[:, None])
        if window is not None:
            expected_BmM &= j_M > i_m[:, None] - window
        if not torch.equal(seen_BmM, expected_BmM):
            return None
        begins.append(begins_Bm)
        latest_B1 = start_Bm[:, -1:]
    places = torch.cat(begins, 1).flatten().nonzero()[:, 0].tolist()
    return [end - start for start, end in zip(places, [*places[1:], B * M])]
