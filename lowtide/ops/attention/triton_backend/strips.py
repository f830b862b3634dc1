"""What backward keeps of the scores in memory, and of how many at a time.

Gradients of scores, once computed, are of use up to four times: for those of query, key and a bias, and with
them the weights for the value's. All of them would be O(M N), so this is done strip by strip: some batches,
some heads and some keys, as many as there is room for, and all queries: the gradients of its keys are done
with a strip, and each number of a bias's gradient is one sum of one program (so a strip has all batches, or
heads, of a bias that they share; but where float32's pieces of so many are too much, it is added up over
strips, in float32). Where a strip has not all keys, the gradient of its heads' queries is added up over
strips, in float32.

Who computes the scores is the only difference: with more features than fit into registers (half precision
above 256) a kernel that makes nothing else, so that weights are kept too and all gradients are products of
what is kept; else the kernel that makes the gradients of key and value, or of the value alone where both are
too many sums for its registers, so that the others are products.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries and keys, E
of values.
"""

from collections.abc import Sequence
from typing import NamedTuple

from lowtide.ops.attention.definition.operands import Operands, Options, Sizes
from lowtide.ops.attention.triton_backend.bf16_split import padded
from lowtide.ops.attention.triton_backend.tile_sizes import cdiv

# Bytes that a strip holds, its operands' pieces and such a sum too: 256 MiB of gradients, and those of some
# heads. More if one of the fewest keys holds more: for each number that is kept of a score, as much as a
# gradient of 128 features (decision 0050).
ROOM = 304 << 20
# And of one matrix of all scores, in the operands' dtype. The leanest dense way holds three in backward
# (weights, their gradients and those of the scores), ten times as much (decision 0050).
SHARE = 3 / 10
# Strips of keys are a multiple of these wide, of the keys of any tile.
KEYS = 128
# Queries are padded to a multiple of these: loads and stores of 16 bytes are aligned.
QUERIES = 16


class Strip(NamedTuple):
    first_batch: int
    batches: int
    first_group: int
    groups: int
    first_key: int
    keys: int

    def heads(self, size: Sizes) -> slice:
        """Its query heads."""
        return slice(self.first_group * size.R, (self.first_group + self.groups) * size.R)

    def shape(self, size: Sizes) -> tuple[int, int, int]:
        """Heads, keys, queries: of what is kept, heads in the order (key head, batch, R)."""
        return self.groups * self.batches * size.R, up(self.keys, KEYS), up(size.M, QUERIES)


class Kept(NamedTuple):
    weight: bool = False
    """As dropout leaves them."""
    grad_scores: bool = False
    """Of q k^T before its scale, which query and key get theirs from; and a bias, without a soft cap."""
    grad_z: bool = False
    """Of what the softmax takes, which a bias gets its gradient from: behind a soft cap something else."""


def kept(operands: Operands, options: Options, wanted: Sequence[bool], together: bool, many: bool) -> Kept:
    """together: one kernel makes the gradients of key and value; many: none does, of so many features.

    A bias with rows and columns gets its gradient from kept scores alone. Otherwise they are kept where
    products are dear: float32, six to one of half precision, which is faster when it computes scores again
    (403 TFLOP/s on an H200, in 3 MiB; decision 0050)."""
    query, key, value = wanted[:3]
    bias = operands.bias is not None and min(operands.bias.shape[2:]) > 1 and wanted[3]
    capped = options.softcap > 0
    if many:
        return Kept(value, query or key or (bias and not capped), bias and capped)
    apart = key and not together
    dear = operands.query.dtype.itemsize == 4 and (apart or (query and (key or value)))
    return Kept(False, dear or (bias and (not capped or query or apart)), bias and capped)


def strips(
    size: Sizes, score_bytes: int, pieces: int, shared_batches: bool = False, shared_heads: bool = False
) -> list[Strip]:
    """As even as can be: first by heads, then by batches, last by keys. score_bytes: of all that is kept of
    one score; pieces: of each operand, 0 of those that are not cut; shared: a bias that gets its gradient is
    the same for all, which are in each strip if there is room for their pieces."""
    B, H, G, M, N, K, E = size
    room = min(ROOM, int(SHARE * (4 if pieces else 2) * B * H * M * N))
    columns = cdiv(N, KEYS)
    # Of one batch and key head.
    column = max(1, score_bytes) * size.R * up(M, QUERIES) * KEYS
    operands = 2 * pieces * (size.R * M + N) * (padded(K) + padded(E))
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
    """How many at a time: the same each time, unless that takes twice as many times. Programs of equal work
    come in waves as wide as the card; a strip that is smaller leaves some of it idle."""
    times = cdiv(total, most)
    times = next((each for each in range(times, 2 * times) if total % each == 0), times)
    return cdiv(total, times)
