"""Define the masks of several sequences, under the names that xformers gave them.

Shapes: M queries and N keys of all sequences; B_i sequences of M_i queries in tensor i.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.ops.attention.definition.intervals import Band, VectorCache, may_keep
from lowtide.ops.attention.definition.masks import BY_SEQUENCES, AttentionBias

Mask = TypeVar("Mask", bound="BlockDiagonalMask")

ADVICE = "; of a tensor of lengths pass .tolist(), of cu_seqlens cu_seqlens.diff().tolist()"


class BlockDiagonalMask(AttentionBias):
    """Represent sequences of several lengths, one after the other in a batch of one.

    A query sees the keys of its own sequence. Make the mask with :meth:`from_seqlens` or
    :meth:`from_tensor_list`.

    Example::

        mask, x = BlockDiagonalMask.from_tensor_list([x1, x2, x3])  # x: [1, sum of M_i, H, K]
        y1, y2, y3 = mask.split(memory_efficient_attention(x, x, x, mask))

    Memory: the starts of the sequences, once for each device. Also the interval of keys that each
    query sees, 8 bytes a query, and for gradients 8 bytes a key, once for each device, stream and
    window.
    """

    def __init__(
        self, q_seqlens: Sequence[int], kv_seqlens: Sequence[int], batch_sizes: Sequence[int] | None = None
    ) -> None:
        for name, lengths in (("q_seqlen", q_seqlens), ("kv_seqlen", kv_seqlens)):
            if any(not isinstance(length, int) or length < 0 for length in lengths):
                got = list(lengths)
                raise ArgumentError(f"{name} must be a list of ints of at least 0, got {got}{ADVICE}")
        if len(q_seqlens) != len(kv_seqlens):
            raise ArgumentError(
                f"q_seqlen and kv_seqlen must be as long, got {len(q_seqlens)} and {len(kv_seqlens)}"
            )
        self.q_starts = (0, *accumulate(q_seqlens))
        self.k_starts = (0, *accumulate(kv_seqlens))
        self.made_for = self.q_starts[-1], self.k_starts[-1]
        # The name is that of xformers, because some code (DINOv2) makes the mask from lengths alone
        # and then sets this attribute.
        self._batch_sizes = batch_sizes
        self._starts: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self.kept_vectors = VectorCache()

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> "BlockDiagonalMask":
        """Return the mask of sequences with these lengths; `kv_seqlen` defaults to `q_seqlen`.

        If a device is given, the starts of the sequences are copied there now. Raises a ValueError
        if a length is not an int of at least 0, or if the two lists differ in length.
        """
        both = q_seqlen, q_seqlen if kv_seqlen is None else kv_seqlen
        for name, each in zip(("q_seqlen", "kv_seqlen"), both):
            if not isinstance(each, Iterable):
                kind = type(each).__name__
                raise ArgumentTypeError(f"{name} must be a list of ints of at least 0, got {kind}{ADVICE}")
        mask = cls(*map(tuple, both))
        if device is not None:
            mask.blocks(torch.device(device))
        return mask

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> "tuple[BlockDiagonalMask, Tensor]":
        """Return the mask of several tensors, and all of them as one tensor [1, sum, ...].

        Shapes: each tensor is [B_i, M_i, ...] and holds B_i sequences.
        """
        if not tensors or any(each.dim() < 2 or each.shape[2:] != tensors[0].shape[2:] for each in tensors):
            shapes = [list(each.shape) for each in tensors]
            raise ArgumentError(
                "tensors must be one or more [B_i, M_i, ...], alike from the third dimension on, "
                f"got {shapes}"
            )
        lengths = [tensor.shape[1] for tensor in tensors for _ in range(tensor.shape[0])]
        mask = cls(lengths, lengths, [tensor.shape[0] for tensor in tensors])
        return mask, torch.cat([tensor.flatten(0, 1) for tensor in tensors])[None]

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the parts of a tensor that :meth:`from_tensor_list` joined, or of a result.

        Of a tensor without sequences, [0, M_i, ...], the part is [0, 0, ...].
        """
        return self.split_queries(tensor)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        """Return the parts of a tensor [1, M, ...], by the queries of each sequence."""
        return self._split(tensor, self.q_starts)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        """Return the parts of a tensor [1, N, ...], by the keys of each sequence."""
        return self._split(tensor, self.k_starts)

    def _split(self, tensor: Tensor, starts: Sequence[int]) -> list[Tensor]:
        """Return the parts of a tensor: one for each joined tensor, or else for each sequence."""
        if tensor.shape[:2] != (1, starts[-1]):
            raise ArgumentError(f"tensor must have shape [1, {starts[-1]}, ...], got {list(tensor.shape)}")
        parts, sequence = [], 0
        for batch in self._batch_sizes or (1,) * (len(starts) - 1):
            piece = tensor[0, starts[sequence] : starts[sequence + batch]]
            parts.append(piece.unflatten(0, (batch, len(piece) // max(batch, 1))))
            sequence += batch
        return parts

    def make_causal(self) -> "BlockDiagonalCausalMask":
        """Return a mask of the same sequences, each with a :class:`LowerTriangularMask`."""
        return self._as(BlockDiagonalCausalMask)

    def blocks(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where each sequence starts among queries and among keys, and where the last ends.

        Both vectors are int32, on the device.
        """
        found = self._starts.get(device)
        if found is None:
            found = (
                torch.tensor(self.q_starts, dtype=torch.int32, device=device),
                torch.tensor(self.k_starts, dtype=torch.int32, device=device),
            )
            if torch.compiler.is_compiling() or may_keep(device):
                self._starts[device] = found
        return found

    def __copy__(self) -> "BlockDiagonalMask":
        return self._as(type(self))

    def _as(self, kind: type[Mask]) -> Mask:
        """Return a mask of this class that shares what this one keeps."""
        other = object.__new__(kind)
        other.__dict__.update(self.__dict__)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickle and deepcopy take: not what belongs to a device and a stream."""
        return self.__dict__ | {"_starts": {}, "kept_vectors": VectorCache()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.q_starts) - 1} sequences)"


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Represent a :class:`BlockDiagonalMask` that is causal within each sequence.

    The i-th query of a sequence sees no key after the i-th key of that sequence.
    """

    band = Band(right=0)


BY_SEQUENCES |= {BlockDiagonalMask, BlockDiagonalCausalMask}
