"""How large chunks and blocks are on the path without a pass over the logits, where a weight's gradient is
formed class by class: in two sweeps, of what belongs to tokens, and of what belongs to classes.

For a chunk of C tokens, the first takes blocks of B classes in turn: E [C, B], and dX_C += E W_B. For a
block of B classes, the second takes chunks in turn: G [C, B], and dW_B += G^T X_C. Each pair is two products
of C x B x D. How long they take is a matter of waves: of the tiles of a result each multiprocessor takes one
at a time, and the last wave is as long as a full one. Beside that the sum is read and written for each pair,
and a few small kernels are launched.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import functools
from dataclasses import dataclass

# Of an H100 or H200, and its tiles of 128 x 256 at about 0.7 PFLOP/s; seconds, and bytes a second.
MULTIPROCESSORS, TILE_ROWS, TILE_COLUMNS = 132, 128, 256
SECONDS_A_FEATURE = 12e-9
BYTES_A_SECOND = 4e12
# Of the kernels of a pair that take no time by their size: sums, and what repairs rows where some are marked.
SECONDS_A_PAIR = 15e-6

MOST_CHUNKS = 8  # that the tokens of a block are cut into where there is room for fewer


@dataclass(frozen=True, slots=True)
class ClassBlocks:
    """What the two sweeps hold; in bytes unless said."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    step: int  # of tokens and classes: a tile's
    exponential: int
    found: int
    """What a row has of half a tile, in float32."""
    statistics: int
    """What a row has of all halves of all its tiles, where statistics are all that is wanted."""
    row: int
    """Of a token beside those in the first sweep."""
    gradient_row: int
    """In the second."""
    class_sum: int
    """Of a class in the second."""

    def of_chunk(self, rows: int, classes: int) -> int:
        pairs = -(-self.V // classes)
        found = (classes // self.step + 2 + pairs) * self.found
        return rows * (self.row + max(found + (classes + 8) * self.exponential, self.statistics))

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
    return min(found, key=lambda sizes: _seconds(needs, *sizes, out=sizes[0]))


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
    return min(found, key=lambda sizes: _seconds(needs, *sizes, out=sizes[1]))


def _even(size: int, most: int, step: int) -> int:
    """In as few parts, of about the same size and of whole steps."""
    parts = -(-size // most)
    return min(size, -(-size // parts // step) * step)


def _seconds(needs: ClassBlocks, C: int, B: int, *, out: int) -> float:
    """Of a sweep whose sums are [out, D]."""
    pairs = -(-needs.N // C) * -(-needs.V // B)
    features = _waves(C, B) * needs.D + _waves(out, needs.D) * (C * B // out)
    return pairs * (features * SECONDS_A_FEATURE + out * needs.D * 8 / BYTES_A_SECOND + SECONDS_A_PAIR)


def _waves(rows: int, columns: int) -> int:
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    return -(-tiles // MULTIPROCESSORS)
