"""Choose the sizes of chunks and blocks for the exponentials engine with "by_class".

There the weight gradient is formed class by class, in two sweeps. The first sweep forms what
belongs to tokens: for a chunk of C tokens it takes blocks of B classes in turn, E [C, B], and dX_C
+= E W_B. The second forms what belongs to classes: for a block of B classes it takes chunks in
turn, G [C, B], and dW_B += G^T X_C. Each pair of chunk and block costs two GEMMs of C x B x D and
one addition to the sum. The sizes are those with the least predicted time (cost_model.py).

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import functools
from dataclasses import dataclass

from lowtide.ops.linear_cross_entropy.planning import cost_model

MOST_CHUNKS = 8  # most chunks of a block's tokens that are tried, unless only more of them fit


@dataclass(frozen=True, slots=True)
class ClassBlocks:
    """Hold the memory that the two sweeps take (decision 0034), in bytes unless stated."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    step: int  # multiple of tokens and classes: the tile size
    exponential: int
    """Bytes of one exponential."""
    found: int
    """Bytes of float32 partial sums per row and half tile."""
    statistics: int
    """Bytes per row of the partial sums of all half tiles, if only statistics are wanted."""
    largest: int
    """Bytes per row of all half tiles' largest logits; they reuse the exponentials' memory."""
    row: int
    """Other bytes per token in the first sweep."""
    gradient_row: int
    """Other bytes per token in the second sweep."""
    class_sum: int
    """Bytes per class in the second sweep."""

    def of_chunk(self, rows: int, classes: int) -> int:
        """Return the bytes of the first sweep with these sizes."""
        found = (classes // self.step + 2) * self.found
        exponentials = max((classes + 8) * self.exponential, self.largest)
        return rows * (self.row + max(found + exponentials, self.statistics))

    def of_block(self, rows: int, classes: int) -> int:
        """Return the bytes of the second sweep with these sizes."""
        return rows * (self.gradient_row + (classes + 8) * self.exponential) + classes * self.class_sum


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
