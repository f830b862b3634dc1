"""Choose the sizes of chunks and blocks for the exponentials engine with "class_blocks".

There the weight gradient is formed class by class, in two sweeps. The first sweep forms what
belongs to tokens: for a chunk of C tokens it takes blocks of B classes in turn, E [C, B], and dX_C
+= E W_B. The second forms what belongs to classes: for a block of B classes it takes chunks in
turn, G [C, B], and dW_B += G^T X_C. Each pair of chunk and block costs two GEMMs of C x B x D and
one addition to the sum. The sizes are those with the least predicted time (cost_model.py).

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import functools

from lowtide.ops.linear_cross_entropy.planning import cost_model
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ClassBlocks

MOST_CHUNKS = 8  # most chunks of a block's tokens that are tried, unless only more of them fit


@functools.lru_cache(maxsize=64)
def chunk_sizes(counts: ClassBlocks, room: int, rows: int) -> tuple[int, int]:
    """Return tokens and classes at a time in the first sweep; `rows` tokens and all classes fit."""
    sizes_that_fit = [(rows, counts.V)]
    for C in range(counts.step, min(counts.N, 4096) + counts.step, counts.step):
        C = min(C, counts.N)
        B = (room // C - counts.row - 8 * counts.exponential) // counts.exponential
        B -= B % counts.step
        while B > 0 and counts.of_chunk(C, B) > room:
            B -= counts.step
        if 0 < B < counts.V:
            sizes_that_fit.append((C, _even(counts.V, B, counts.step)))
    return min(sizes_that_fit, key=lambda sizes: _seconds(counts, *sizes, first=True))


@functools.lru_cache(maxsize=64)
def block_sizes(counts: ClassBlocks, room: int) -> tuple[int, int]:
    """Return tokens and classes at a time in the second sweep."""
    sizes_that_fit: list[tuple[int, int]] = []
    chunks = 1
    while chunks <= MOST_CHUNKS or not sizes_that_fit:
        C = -(-counts.N // chunks)
        C = _even(counts.N, C, counts.step if counts.step < C else 1)
        B = min(counts.V, (room - counts.of_block(C, 0)) // (counts.class_sum + C * counts.exponential))
        whole = B - B % counts.step
        if B == counts.V or 0 < B < counts.step:
            sizes_that_fit.append((C, B))
        sizes_that_fit += [(C, each) for each in range(whole, whole // 2, -counts.step)]
        chunks = chunks + 1 if chunks < MOST_CHUNKS else 2 * chunks
    return min(sizes_that_fit, key=lambda sizes: _seconds(counts, *sizes, first=False))


def _even(size: int, most: int, step: int) -> int:
    """Return the size of the fewest parts of at most `most`: about equal, whole steps."""
    parts = -(-size // most)
    return min(size, -(-size // parts // step) * step)


def _seconds(counts: ClassBlocks, C: int, B: int, *, first: bool) -> float:
    """Return the predicted seconds of a sweep."""
    pairs, D = -(-counts.N // C) * -(-counts.V // B), counts.D
    product = cost_model.product_of_rows_seconds(C, D, B) if first else cost_model.product_seconds(B, D, C)
    addition = cost_model.addition_seconds(4 * D * (C if first else B))
    return pairs * (cost_model.exponentials_seconds(C, B, D) + product + addition)
