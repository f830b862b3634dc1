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
def chunk(needs: ClassBlocks, room: int, rows: int) -> tuple[int, int]:
    """Return tokens and classes at a time in the first sweep; `rows` tokens and all classes fit."""
    found = [(rows, needs.V)]
    for C in range(needs.step, min(needs.N, 4096) + needs.step, needs.step):
        C = min(C, needs.N)
        B = (room // C - needs.row - 8 * needs.exponential) // needs.exponential
        B -= B % needs.step
        while B > 0 and needs.of_chunk(C, B) > room:
            B -= needs.step
        if 0 < B < needs.V:
            found.append((C, _even(needs.V, B, needs.step)))
    return min(found, key=lambda sizes: _seconds(needs, *sizes, first=True))


@functools.lru_cache(maxsize=64)
def block(needs: ClassBlocks, room: int) -> tuple[int, int]:
    """Return tokens and classes at a time in the second sweep."""
    found: list[tuple[int, int]] = []
    chunks = 1
    while chunks <= MOST_CHUNKS or not found:
        C = -(-needs.N // chunks)
        C = _even(needs.N, C, needs.step if needs.step < C else 1)
        B = min(needs.V, (room - needs.of_block(C, 0)) // (needs.class_sum + C * needs.exponential))
        whole = B - B % needs.step
        if B == needs.V or 0 < B < needs.step:
            found.append((C, B))
        found += [(C, each) for each in range(whole, whole // 2, -needs.step)]
        chunks = chunks + 1 if chunks < MOST_CHUNKS else 2 * chunks
    return min(found, key=lambda sizes: _seconds(needs, *sizes, first=False))


def _even(size: int, most: int, step: int) -> int:
    """Return the size of the fewest parts of at most `most`: about equal, whole steps."""
    parts = -(-size // most)
    return min(size, -(-size // parts // step) * step)


def _seconds(needs: ClassBlocks, C: int, B: int, *, first: bool) -> float:
    """Return the predicted seconds of a sweep."""
    pairs, D = -(-needs.N // C) * -(-needs.V // B), needs.D
    product = cost_model.product_of_rows(C, D, B) if first else cost_model.product(B, D, C)
    addition = cost_model.addition(4 * D * (C if first else B))
    return pairs * (cost_model.exponentials(C, B, D) + product + addition)
