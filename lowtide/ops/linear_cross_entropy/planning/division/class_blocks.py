"""Choose the sizes of chunks and blocks for the exponentials engine with "class_blocks".

With "class_blocks" the weight gradient dW [V, D] is formed a block of classes at a time, which
takes two sweeps over the tokens. E are the exponentials (exponentials/engine.py has the formulas).

The first sweep computes what belongs to tokens: row statistics and dX. For a chunk of C tokens it
computes E [C, V] in the memory of dW, and from it the product E W that becomes dX. If that memory
is too small for all classes, E is computed a block of classes at a time, and the product is summed
over the blocks. For the last R tokens, E is computed B classes at a time, and stays in the memory
of these classes' rows of dW.

The second sweep computes dW. For each block of B classes it goes through the tokens that are not
stored, a chunk at a time. It computes E again, times a coefficient of each row, as G [C, B], and
adds G^T X to the block's sum. For the stored tokens G is read from memory.

The sizes are those with the least predicted time (cost_model.py).

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block; R tokens that
are stored; X [C, D] and W [B, D] are rows of input and weight.
"""

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ClassBlocks
from lowtide.ops.linear_cross_entropy.planning.division import cost_model
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling

MOST_ROWS = 4096  # most tokens of a chunk of the first sweep
PRODUCT_ROWS = (512, 1024, 2048)  # values of product_rows that are tried
MOST_CHUNKS = 8  # most chunks per block of the second sweep that are tried, unless none of these fit
WIDTHS = 16  # about this many block widths are tried, between half of what fits and all of it
REPEATED = 2 * cost_model.LAUNCH  # seconds of two kernels of recompute.py, if no row is marked


class BlockSizes(NamedTuple):
    """Hold the sizes in the order of Tiling's fields."""

    rows: int
    chunk_classes: int
    product_rows: int
    block_rows: int
    block_classes: int
    stored_rows: int


def held(counts: ClassBlocks, of: Tiling | BlockSizes) -> int:
    """Return the bytes of the sweep that holds more."""
    return max(_held_first(counts, of), _held_second(counts, of))


@functools.lru_cache(maxsize=64)
def sizes(counts: ClassBlocks, room: int, block_room: int) -> BlockSizes:
    """Return the quickest sizes that fit: `room` and `block_room` are the sweeps' bytes."""
    found = [_sizes_of(counts, room, block_room, stored) for stored in _stored(counts)]
    return min((each for each in found if each), key=functools.partial(seconds, counts))


def seconds(counts: ClassBlocks, of: Tiling | BlockSizes) -> float:
    """Return the predicted seconds of both sweeps."""
    return _of_tokens(counts, of) + _of_classes(counts, of)


def _sizes_of(counts: ClassBlocks, room: int, block_room: int, stored: int) -> BlockSizes | None:
    """Return the quickest sizes if this many tokens are stored, or None if none fit.

    First the block is chosen for the largest chunk, and then the chunk for this block.
    """
    rows = _rows(counts, room)
    tall = max(rows)
    blocks = (
        BlockSizes(tall, counts.most_classes(tall), PRODUCT_ROWS[-1], C, B, stored)
        for C, B in _blocks(counts, block_room, stored)
    )
    block = min(blocks, key=functools.partial(seconds, counts), default=None)
    if block is None:
        return None
    chunks = (
        block._replace(rows=C, chunk_classes=counts.most_classes(C), product_rows=at_once)
        for C in rows
        for at_once in PRODUCT_ROWS
    )
    fitting = (each for each in chunks if _held_first(counts, each) <= room)
    return min(fitting, key=functools.partial(_of_tokens, counts), default=None)


def _stored(counts: ClassBlocks) -> list[int]:
    """Return the numbers of stored tokens to try: 0, half of the most, and the most.

    One step less than the most is tried, too. It may fit where the most does not, because rows of a
    last block are padded.
    """
    most = min(counts.N, counts.gradient // counts.exponential)
    fewer = (0, most // 2, most - counts.step, most)
    return sorted({most if each == counts.N else max(0, each - each % counts.step) for each in fewer})


def _rows(counts: ClassBlocks, room: int) -> list[int]:
    """Return the numbers of tokens per chunk to try: 1, as many as fit, whole tiles, the most."""
    most = min(counts.N, MOST_ROWS)
    few = max(1, min(most, room // counts.of_chunk(1, counts.V, 1)))
    return [C for C in (1, few, *range(counts.step, most, counts.step), most) if counts.most_classes(C) > 0]


def _blocks(counts: ClassBlocks, room: int, stored: int) -> Iterator[tuple[int, int]]:
    """Yield the sizes to try in the second sweep: tokens per chunk and classes per block."""
    others, chunks, fits = counts.N - stored, 1, False
    while chunks <= MOST_CHUNKS or (not fits and chunks < 2 * others):
        C = -(-others // chunks)
        C = _even(others, C, counts.step if counts.step < C else 1) if others else 1
        free = room - _held_second(counts, BlockSizes(MOST_ROWS, 0, 0, C, 0, stored))
        most = min(counts.V, free // (counts.class_sum + C * counts.exponential))
        whole = most - most % counts.step
        step = counts.step * max(1, whole // (2 * WIDTHS * counts.step))
        widths = [most] if most == counts.V or most < counts.step else []
        for B in (*widths, *range(whole, whole // 2, -step)):
            held = _held_second(counts, BlockSizes(MOST_ROWS, 0, 0, C, B, stored))
            if B > 0 and stored <= counts.most_stored(B) and held <= room:
                fits = True
                yield C, B
        if not others:
            return
        chunks = chunks + 1 if chunks < MOST_CHUNKS else 2 * chunks


def _even(size: int, most: int, step: int) -> int:
    """Return the size of a part, in whole steps, if `size` is divided into the fewest equal parts.

    Without the rounding to whole steps, a part has at most `most`.
    """
    parts = -(-size // most)
    return min(size, -(-size // parts // step) * step)


def _held_first(counts: ClassBlocks, of: Tiling | BlockSizes) -> int:
    """Return the bytes that the first sweep holds."""
    stored, others = of.stored_rows, counts.N - of.stored_rows
    bytes = counts.of_chunk(min(of.rows, others), of.chunk_classes, of.product_rows) if others else 0
    if stored:
        of_stored = counts.of_chunk(min(of.rows, stored), of.block_classes, of.product_rows, stored=True)
        bytes = max(bytes, of_stored)
    return bytes


def _held_second(counts: ClassBlocks, of: Tiling | BlockSizes) -> int:
    """Return the bytes that the second sweep holds."""
    at_once = min(of.rows, of.stored_rows) if counts.copies_rows else of.stored_rows
    return counts.of_block(of.block_rows, of.block_classes, at_once)


def _exponentials(counts: ClassBlocks, C: int, B: int) -> float:
    return cost_model.exponentials_seconds(C, B, counts.D, softcap=counts.softcap)


def _of_tokens(counts: ClassBlocks, of: Tiling | BlockSizes) -> float:
    """Return the predicted seconds of the first sweep."""
    D, at_once, stored = counts.D, of.product_rows, of.stored_rows
    in_blocks = of.chunk_classes < counts.V

    def pair(C: int, B: int) -> float:
        product = cost_model.product_of_rows_seconds(C, D, B, most=at_once)
        return _exponentials(counts, C, B) + product + in_blocks * REPEATED

    def stored_pair(C: int, B: int) -> float:
        product = cost_model.product_of_rows_seconds(C, D, B, most=at_once)
        scaled = cost_model.traffic_seconds(2 * counts.exponential * C * B)
        return _exponentials(counts, C, B) + product + scaled + REPEATED

    others = _pairs(counts.N - stored, of.rows, counts.V, of.chunk_classes, pair)
    return others + _pairs(stored, of.rows, counts.V, of.block_classes, stored_pair)


def _of_classes(counts: ClassBlocks, of: Tiling | BlockSizes) -> float:
    """Return the predicted seconds of the second sweep."""
    D, stored = counts.D, of.stored_rows
    chunks = -(-(counts.N - stored) // of.block_rows) + (stored > 0)

    def product(C: int, B: int) -> float:
        return cost_model.product_seconds(B, D, C, (8 if chunks > 1 else 4) * B * D)

    def pair(C: int, B: int) -> float:
        return _exponentials(counts, C, B) + product(C, B)

    def rounded(C: int, B: int) -> float:
        return cost_model.traffic_seconds((4 + counts.exponential) * B * D)

    others = _pairs(counts.N - stored, of.block_rows, counts.V, of.block_classes, pair)
    kept = _pairs(stored, max(stored, 1), counts.V, of.block_classes, product)
    return others + kept + _pairs(1, 1, counts.V, of.block_classes, rounded)


def _pairs(N: int, C: int, V: int, B: int, seconds: Callable[[int, int], float]) -> float:
    """Return the seconds of all pairs of a chunk of C tokens and a block of B classes.

    The last chunk and the last block may be smaller.
    """
    return sum(
        chunks * blocks * seconds(tokens, classes)
        for chunks, tokens in ((N // C, C), (1, N % C))
        for blocks, classes in ((V // B, B), (1, V % B))
        if chunks * blocks * tokens * classes
    )
