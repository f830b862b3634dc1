"""Decide which scores backward stores in memory, and how many at a time.

A gradient of a score serves up to four times: for the gradients of query, key and bias and, with
the weights, for that of the value. Storing all of them would take O(M N). So backward works strip
by strip. A strip has some batches, some heads and some keys, as many as fit, and all queries.

The gradients of a strip's keys are complete with the strip. Where a strip does not have all keys,
the gradient of its queries is summed over strips, in float32. Each number of a bias's gradient is
one sum in one program, so a strip has all batches, or all heads, that share a bias. The exception
is float32, where the pieces of so many may not fit: then the bias's gradient is summed over strips,
in float32.

Two kernels can compute the scores. With more features than fit into registers (half precision above
256), it is one that computes nothing else: the weights are stored too, and all gradients are
products of what is stored. Otherwise it is the one that computes the gradients of key and value, or
of the value alone where both are too many sums for its registers; the remaining gradients are
products.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries
and keys, E of values.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.definition.operands import AttentionOptions, AttentionSizes, Operands
from lowtide.ops.attention.triton_backend.kernels.bf16_split import padded_width

# Bytes that a strip may hold, including its operands' pieces and a float32 sum of dq: 256 MiB of
# gradients, and the pieces and sums of some heads. A strip of the fewest keys may hold more. For
# each number stored of a score it takes as much as a gradient of 128 features (decision 0050).
ROOM = 304 << 20
# The same as a share of one matrix of all scores, in the operands' dtype. The leanest dense way
# holds three in backward (weights, their gradients, and those of the scores), ten times as much
# (decision 0050).
SHARE = 3 / 10
# The width of a strip of keys is a multiple of this, and so of the keys of any tile.
KEYS = 128
# Queries are padded to a multiple of this, so that loads and stores of 16 bytes are aligned.
QUERIES = 16


class Strip(NamedTuple):
    """Hold the batches, key heads and keys of one strip."""

    first_batch: int
    batches: int
    first_group: int
    groups: int
    first_key: int
    keys: int

    @property
    def end_key(self) -> int:
        return self.first_key + self.keys

    @property
    def key_heads(self) -> slice:
        return slice(self.first_group, self.first_group + self.groups)

    def heads(self, size: AttentionSizes) -> slice:
        return slice(self.first_group * size.R, (self.first_group + self.groups) * size.R)

    def shape(self, size: AttentionSizes) -> tuple[int, int, int]:
        """Return the shape of what is stored, in heads, keys and queries.

        Heads are in the order (key head, batch, R).
        """
        return self.groups * self.batches * size.R, up(self.keys, KEYS), up(size.M, QUERIES)


class Stored(NamedTuple):
    """Hold which numbers backward stores for each score."""

    weight: bool = False
    """The weights, after dropout."""
    grad_scores: bool = False
    """Gradients of q k^T before its scale, for query, key and, without a soft cap, a bias."""
    grad_z: bool = False
    """Gradients of the softmax's input z, for a bias beside a soft cap."""


def scores_to_store(
    operands: Operands, options: AttentionOptions, needs_grad: Sequence[bool], together: bool, many: bool
) -> Stored:
    """Return what backward stores of each score.

    together: one kernel computes the gradients of key and value. many: there are too many features
    for any kernel that computes one of them.

    A bias with rows and columns needs stored scores for its gradient. Otherwise scores are stored
    where products are expensive: in float32, where one product takes six of half precision. Half
    precision alone is faster when it computes the scores again (403 TFLOP/s on an H200, in 3 MiB;
    decision 0050).
    """
    query, key, value = needs_grad[:3]
    bias = operands.bias is not None and min(operands.bias.shape[2:]) > 1 and needs_grad[3]
    capped = options.softcap > 0
    if many:
        return Stored(value, query or key or (bias and not capped), bias and capped)
    key_apart = key and not together
    expensive = operands.query.dtype.itemsize == 4 and (key_apart or (query and (key or value)))
    return Stored(False, expensive or (bias and (not capped or query or key_apart)), bias and capped)


def strips(
    size: AttentionSizes,
    score_bytes: int,
    pieces: int,
    shared_batches: bool = False,
    shared_heads: bool = False,
) -> list[Strip]:
    """Return the strips, as even as possible: split by heads first, then by batches, last by keys.

    score_bytes: bytes of all that is stored for one score. pieces: of each operand, 0 if it is not
    split. shared_batches, shared_heads: a bias that needs a gradient is the same for all of them,
    so each strip has all, if their pieces fit.
    """
    B, H, G, M, N, K, E = size
    room = min(ROOM, int(SHARE * (4 if pieces else 2) * B * H * M * N))
    columns = cdiv(N, KEYS)
    # Bytes of 128 keys of one batch and key head.
    column = max(1, score_bytes) * size.R * up(M, QUERIES) * KEYS
    operands = 2 * pieces * (size.R * M + N) * (padded_width(K) + padded_width(E))
    most = room // (column * columns + operands)
    fewest = (B if shared_batches else 1) * (G if shared_heads else 1)
    if pieces and fewest * (column + operands) > room:
        shared_batches = shared_heads = False
    groups = G if shared_heads else evenly(G, max(1, min(G, most // B)))
    batches = B if shared_batches else evenly(B, max(1, min(B, most // groups)))
    keys, heads = columns, batches * groups
    if most < heads:
        query_sum = 0 if pieces else 4 * size.R * M * K
        most = (room - (operands + query_sum) * heads) // (column * heads)
        keys = evenly(columns, max(1, min(columns, most)))
    return [
        Strip(b, min(batches, B - b), g, min(groups, G - g), n, min(keys * KEYS, N - n))
        for b in range(0, B, batches)
        for g in range(0, G, groups)
        for n in range(0, N, keys * KEYS)
    ]


def up(total: int, step: int) -> int:
    return cdiv(total, step) * step


def evenly(total: int, most: int) -> int:
    """Return how many to take at a time, at most `most`.

    It divides the total evenly, unless that would take twice as many times. Programs of equal work
    run in waves as wide as the card; a smaller strip would leave some of the card idle.
    """
    times = cdiv(total, most)
    times = next((each for each in range(times, 2 * times) if total % each == 0), times)
    return cdiv(total, times)
