"""Decide which scores dropout keeps, as a function of (seed, b, h, i, j) alone.

The answer is the same on every device and for every tile size. A score's 32 random bits are
mix(row key xor column key). Row keys and column keys are hashes of the indices, one for each query
and for each key of attention. There are O(B H M + N) of them. In a tile, each score costs one
mixing of 32-bit integers, in `keep_mask` below or in triton_backend/kernels/tiles.py. The mixing is
"lowbias32" of Chris Wellons' hash prospector (github.com/skeeto/hash-prospector), a bijection.

Shapes: B batches, H heads, M queries, N keys.
"""

import torch
from torch import Tensor

FIRST, SECOND = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9
WORD = 0xFFFFFFFF


def row_keys(seed: Tensor, B: int, H: int, M: int) -> Tensor:
    """Return the row key of each query, [B, H, M], int32."""
    b, h, i = (torch.arange(size, device=seed.device) for size in (B, H, M))
    key_BH = _chain(_chain(_seed_key(seed), b)[:, None], h)
    return _to_int32(_chain(key_BH[:, :, None], i))


def column_keys(seed: Tensor, N: int) -> Tensor:
    """Return the column key of each key of attention, [N], int32."""
    key, j = _chain(_seed_key(seed), torch.full_like(seed, GOLDEN)), torch.arange(N, device=seed.device)
    return _to_int32(_chain(key, j))


def keep_mask(row_key: Tensor, column_key: Tensor, dropout: float) -> Tensor:
    """Return True for each score that dropout keeps; row and column keys broadcast.

    The mixing's last step is left out. It would change only the lower 16 of the 32 bits, and these
    decide the comparison only if the upper 16 are those of the limit.
    """
    bits = row_key ^ column_key
    bits ^= (bits >> 16) & 0xFFFF  # a logical shift: >> copies the sign
    bits *= FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= SECOND - (1 << 32)
    return bits > limit(dropout)


def limit(dropout: float) -> int:
    """Return the largest value of the bits, as a signed integer, for which a score is dropped."""
    return max(round(dropout * 2**32) - 2**31 - 1, -(2**31))


def rescale(dropout: float) -> float:
    """Return the factor of the weights that dropout keeps, 1 / (1 - rate)."""
    return 0.0 if dropout >= 1 else 1 / (1 - dropout)


def _seed_key(seed: Tensor) -> Tensor:
    """Return the hash of the seed's two 32-bit words."""
    low, high = seed & WORD, (seed >> 32) & WORD
    return _chain(_mix(low), high)


def _chain(key: Tensor, value: Tensor) -> Tensor:
    """Return the hash of a key and one more index."""
    return _mix(((key + GOLDEN) & WORD) ^ value)


def _mix(bits: Tensor) -> Tensor:
    """Return lowbias32 of numbers below 2^32, in int64.

    Products may overflow int64, but their lower 32 bits are right, and no others are used.
    """
    bits = bits ^ (bits >> 16)
    bits = (bits * FIRST) & WORD
    bits = bits ^ (bits >> 15)
    bits = (bits * SECOND) & WORD
    return bits ^ (bits >> 16)


def _to_int32(bits: Tensor) -> Tensor:
    """Return unsigned 32-bit numbers as int32 with the same bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
