"""Decide which scores dropout keeps, as a function of (seed, b, h, i, j) alone.

The answer is the same on every device and for every tile size. A score's 32 random bits are
hash(row key xor column key). The keys are O(M + N) hashes, made here. A tile mixes 32-bit integers
once for each score, in torch below and in triton_backend/kernels/tiles.py. The mixing is
"lowbias32" of Chris Wellons' hash prospector (github.com/skeeto/hash-prospector), which is a
bijection.

Shapes: B batches, H heads, M queries, N keys.
"""

import torch
from torch import Tensor

FIRST, SECOND = 0x7FEB352D, 0x846CA68B
GOLDEN = 0x9E3779B9
WORD = 0xFFFFFFFF


def row_keys(seed: Tensor, B: int, H: int, M: int) -> Tensor:
    """Return a key for each query, [B, H, M], int32."""
    b, h, i = (torch.arange(size, device=seed.device) for size in (B, H, M))
    key_BH = _chain(_chain(_seed_key(seed), b)[:, None], h)
    return _to_int32(_chain(key_BH[:, :, None], i))


def column_keys(seed: Tensor, N: int) -> Tensor:
    """Return a key for each key column, [N], int32."""
    key, j = _chain(_seed_key(seed), torch.full_like(seed, GOLDEN)), torch.arange(N, device=seed.device)
    return _to_int32(_chain(key, j))


def keep_mask(row_key: Tensor, column_key: Tensor, dropout: float) -> Tensor:
    """Return True for each score that dropout keeps; the keys broadcast against each other.

    Only the upper bits of the last product are compared. The mixing's last step does not change
    them, so it is left out.
    """
    bits = row_key ^ column_key
    bits ^= (bits >> 16) & 0xFFFF  # a logical shift: >> copies the sign
    bits *= FIRST
    bits ^= (bits >> 15) & 0x1FFFF
    bits *= SECOND - (1 << 32)
    return bits > limit(dropout)


def limit(dropout: float) -> int:
    """Return the largest signed integer of bits for which a score is dropped."""
    return max(round(dropout * 2**32) - 2**31 - 1, -(2**31))


def rescale(dropout: float) -> float:
    """Return the factor of the scores that are kept."""
    return 0.0 if dropout >= 1 else 1 / (1 - dropout)


def _seed_key(seed: Tensor) -> Tensor:
    """Return the hash of both words of the seed."""
    low, high = seed & WORD, (seed >> 32) & WORD
    return _chain(_mix(low), high)


def _chain(key: Tensor, value: Tensor) -> Tensor:
    """Return the hash of a key and one more index."""
    return _mix(((key + GOLDEN) & WORD) ^ value)


def _mix(bits: Tensor) -> Tensor:
    """Return lowbias32 of numbers below 2^32, in int64.

    Products wrap, and their lower words are right.
    """
    bits = bits ^ (bits >> 16)
    bits = (bits * FIRST) & WORD
    bits = bits ^ (bits >> 15)
    bits = (bits * SECOND) & WORD
    return bits ^ (bits >> 16)


def _to_int32(bits: Tensor) -> Tensor:
    """Return unsigned 32-bit numbers as int32 with the same bits."""
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
