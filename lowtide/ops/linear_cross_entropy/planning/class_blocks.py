"""How large chunks and blocks are on the path without a pass over the logits, where a weight's gradient is
formed class by class: in two sweeps, of what belongs to tokens, and of what belongs to classes.

For a chunk of C tokens, the first takes blocks of B classes in turn: E [C, B], and dX_C += E W_B. For a
block of B classes, the second takes chunks in turn: G [C, B], and dW_B += G^T X_C. Each pair is two products
of C x B x D, and an addition to the sum; their sizes are those that should take least time (cost_model.py).

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import functools
from dataclasses import dataclass

from lowtide.ops.linear_cross_entropy.planning import cost_model

MOST_CHUNKS = 8  # that the tokens of a block are cut into where there is room for fewer


@dataclass(frozen=True, slots=True)
class ClassBlocks:
    """What the two sweeps hold (decision 0034); in bytes unless said."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    step: int  # of tokens and classes: a tile's
    exponential: int
    found: int
    """What a row has of half a tile, in float32."""
    statistics: int
    """What a row has of all halves of all its tiles, where statistics are all that is wanted."""
    largest: int
    """What a row's largest logits of all halves take, where exponentials were."""
    row: int
    """Of a token beside those in the first sweep."""
    gradient_row: int
    """In the second."""
    class_sum: int
    """Of a class in the second."""

    def of_chunk(self, rows: int, classes: int) -> int:
        found = (classes // self.step + 2) * self.found
        exponentials = max((classes + 8) * self.exponential, self.largest)
        return rows * (self.row + max(found + exponentials, self.statistics))

    def of_block(self, rows: int, classes: int) -> int:
        return rows * (self.gradient_row + (classes + 8) * self.exponential) + classes * self.class_sum


@functools.lru_cache(maxsize=64)
def chunk(needs: ClassBlocks, room: int, rows: int) -> tuple[int, int]:
    """Tokens and classes at a time in the first sweep; `rows` tokens and all classes fit."""
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
    """Tokens and classes at a time in the second sweep."""
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
    """In as few parts, of about the same size and of whole steps."""
    parts = -(-size // most)
    return min(size, -(-size // parts // step) * step)


def _seconds(needs: ClassBlocks, C: int, B: int, *, first: bool) -> float:
    """Of a sweep."""
    pairs, D = -(-needs.N // C) * -(-needs.V // B), needs.D
    product = cost_model.product_of_rows(C, D, B) if first else cost_model.product(B, D, C)
    addition = cost_model.addition(4 * D * (C if first else B))
    return pairs * (cost_model.exponentials(C, B, D) + product + addition)
