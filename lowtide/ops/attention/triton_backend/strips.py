"""Decide what backward stores for each score, and for how many scores at a time.

A computed score serves up to four gradients. Its weight serves the gradient of the value (dv). Its
own gradient serves those of the query (dq), the key (dk) and the bias. To store the gradients of
all scores would take O(M N) memory. So backward works strip by strip. A strip has all queries, and
as many batches, key heads and keys as fit.

One strip completes dk and dv of its keys. If a strip does not have all keys, dq is summed over
strips, in float32. One program sums each number of the bias's gradient, so a strip has all batches,
or all heads, that share the bias. In float32 the pieces of so many may not fit. Then the bias's
gradient is summed over strips, in float32.

Which kernel computes the scores depends on the features:

* With many features, a kernel computes the scores and nothing else. It stores the weights too, and
  dq, dk and dv are products of what is stored. In half precision these are more than 256 features,
  whose sums of dk or dv do not fit into registers. In float32 they are more than 128 features; with
  at most 512 queries and keys, also fewer, if sums of dk and dv do not fit together (decision
  0101).
* Otherwise the kernel of dk and dv computes the scores, or the kernel of dv alone if sums of both
  do not fit into registers. The other gradients come from the stored gradients of scores.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries
and keys, E of values.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.definition.operands import AttentionOptions, AttentionSizes, Operands
from lowtide.ops.attention.triton_backend.kernels.bf16_split import padded_width

# The most bytes that a strip holds: 256 MiB of stored gradients, and 48 MiB for pieces of its
# operands and a float32 sum of dq (decision 0050). A strip of the fewest keys, KEYS, may hold more:
# each number stored for a score takes as much memory as dq of the strip's heads with 128 features.
ROOM = 304 << 20
# The same limit as a share of one matrix of all scores, in the operands' dtype. The leanest dense
# computation holds three such matrices in backward: the weights, their gradients and those of the
# scores. That is ten times as much (decision 0050).
SHARE = 3 / 10
# With few queries, all scores take less memory than queries, keys and values. A strip may then hold
# this share of these, since strips of few heads leave a part of the card idle (decision 0093).
SHARE_OF_OPERANDS = 1 / 16
# If one matrix of all scores takes at most SMALL bytes, a strip may hold these shares in up to HELD
# bytes; any may hold FEW. Strips of few heads leave a part of the card idle, with many launches
# beside little work (decision 0099).
SMALL, SMALL_SHARE, SMALL_SHARE_OF_OPERANDS, HELD, FEW = 96 << 20, 3 / 4, 1 / 4, 64 << 20, 16 << 20
# Strips are cut at multiples of this many keys. The keys of any tile divide it, so no tile lies in
# two strips.
KEYS = 128
# Stored rows are padded to a multiple of this many queries, so that loads and stores of 16 bytes
# are aligned.
QUERIES = 16


class Strip(NamedTuple):
    """Hold the batches, key heads (groups) and keys of one strip."""

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
        """Return the shape [heads, keys, queries] of each stored tensor, with padding.

        Heads are ordered by key head, then by batch, then by query head within the key head.
        """
        return self.groups * self.batches * size.R, up(self.keys, KEYS), up(size.M, QUERIES)


class Stored(NamedTuple):
    """Hold which numbers backward stores for each score."""

    weight: bool = False
    """The weights after dropout, for dv."""
    grad_scores: bool = False
    """Gradients of scale q k^T, for dq, dk and, without a soft cap, the bias's gradient."""
    grad_z: bool = False
    """Gradients of the softmax's input z, for the bias's gradient if there is a soft cap."""


def scores_to_store(
    operands: Operands,
    options: AttentionOptions,
    needs_grad: Sequence[bool],
    together: bool,
    stores_weights: bool,
) -> Stored:
    """Return what backward stores for each score.

    together: one kernel computes dk and dv. stores_weights: a kernel computes scores and nothing
    else, and stores the weights too.

    The gradient of a bias with more than one row and column needs stored gradients of scores. If
    another kernel writes the bias's gradient, needs_grad[3] is False here. Without such a bias,
    float32 stores them if more than one kernel would compute the scores, since one of its products
    takes up to six products of bfloat16. Half precision recomputes the scores, which is faster
    there (403 TFLOP/s on an H200, in 3 MiB; decision 0050).
    """
    query, key, value = needs_grad[:3]
    bias = operands.bias is not None and min(operands.bias.shape[2:]) > 1 and needs_grad[3]
    capped = options.softcap > 0
    if stores_weights:
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
    """Return strips, as even as possible: split by key heads first, then batches, last keys.

    score_bytes: the bytes of all numbers stored for one score. pieces: the number of pieces of each
    operand, 0 if operands are not split. shared_batches, shared_heads: all batches, or all heads,
    share a bias that needs a gradient. Each strip then has all of them, if their pieces fit.
    """
    B, H, G, M, N, K, E = size
    scores, of_operands = B * H * M * N, B * (H * M + G * N) * (K + E)
    itemsize = 4 if pieces else 2
    room = itemsize * max(SHARE * scores, SHARE_OF_OPERANDS * of_operands)
    if itemsize * scores <= SMALL:
        small = itemsize * (SMALL_SHARE * scores + SMALL_SHARE_OF_OPERANDS * of_operands)
        room = max(room, min(HELD, small))
    room = int(min(ROOM, max(FEW, room)))
    columns = cdiv(N, KEYS)
    # Bytes that KEYS keys of one batch and key head store.
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
    """Return the size of the parts that a total is divided into, at most `most`.

    Parts are equal, unless that would take twice as many parts or more. Programs of equal work fill
    the card in waves, and a smaller last strip would leave a part of the card idle.
    """
    times = cdiv(total, most)
    times = next((each for each in range(times, 2 * times) if total % each == 0), times)
    return cdiv(total, times)
