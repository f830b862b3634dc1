"""Divide a workspace among chunks of tokens, blocks of classes and the accumulator of dW.

Chunks get as many rows as fit beside the fixed memory (byte_counts.py) and the accumulator
(weight_gradient.py).

Shapes: N tokens, D features, V classes.
"""

import functools
from collections.abc import Iterator

from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ROW_TILE, ByteCounts
from lowtide.ops.linear_cross_entropy.planning.division import class_blocks
from lowtide.ops.linear_cross_entropy.planning.division.step_time import chunk_seconds, step_seconds
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling, WeightGradient
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import (
    accumulator_bytes,
    choose_sum_bits,
    choose_weight_gradient,
    fewest_rows,
)

# Number of chunk sizes that are compared, between half of what fits and all of it.
CANDIDATES = 32


def choose_sizes(workspace: int, counts: ByteCounts) -> Tiling:
    """Return the sizes for a workspace."""
    if workspace < counts.smallest_workspace:
        held = f"one row of {counts.V} logits, and vectors of {counts.N} tokens and {counts.V} classes"
        raise too_small(workspace, counts.smallest_workspace, held)
    free = workspace - counts.fixed
    way, bits = choose_weight_gradient(workspace, counts), choose_sum_bits(free, counts)
    if counts.device == "cuda" and counts.class_blocks is not None and way in ("packed", "class_blocks"):
        return min(_packed_or_blocks(free, counts, bits), key=functools.partial(step_seconds, counts))
    tiling = _sizes(free, counts, way, bits)
    if counts.device == "cuda" and tiling.rows < min(counts.N, fewest_rows(counts, way, bits)):
        return _sizes(free, counts, "class_blocks", bits)
    return tiling


def _packed_or_blocks(free: int, counts: ByteCounts, bits: int) -> Iterator[Tiling]:
    """Yield the sizes with a packed sum, if it leaves chunks enough rows, and of class blocks."""
    packed = counts.packed_bytes(bits)
    fewest = max(fewest_rows(counts, "packed", bits), ROW_TILE[counts.device])
    if packed and counts.most_rows(free - packed) >= min(counts.N, fewest):
        yield _sizes(free, counts, "packed", bits)
    yield _sizes(free, counts, "class_blocks", bits)


def too_small(workspace: int, least: int, held: str) -> ArgumentError:
    """Return the error for a workspace that cannot hold what the call needs."""
    return ArgumentError(
        f"workspace must hold {held}: {least} bytes in this call, got {workspace} bytes; "
        "pass more, or None for the default"
    )


def tiling_bytes(counts: ByteCounts, tiling: Tiling) -> int:
    """Return the peak bytes of a call of these sizes, without a float32 sum that it returns."""
    way, two_sweeps = tiling.weight_gradient, counts.class_blocks
    copies = tiling.operand_classes * counts.weight_copy
    if way == "class_blocks" and two_sweeps is not None:
        return counts.fixed + class_blocks.held(two_sweeps, tiling)
    if way == "class_blocks":
        block = counts.class_block(tiling.block_rows, tiling.block_classes)
        return counts.fixed + max(counts.chunk(tiling.rows) + copies, block)
    if way == "single_product":
        return counts.fixed + counts.single_product() + copies
    beside = accumulator_bytes(counts, way, tiling.sum_bits) if way == "packed" else 0
    return counts.fixed + counts.chunk(tiling.rows) + copies + beside


def _sizes(free: int, counts: ByteCounts, way: WeightGradient, bits: int) -> Tiling:
    """Return the sizes for `free` bytes if the weight gradient is formed in this way."""
    N, V, tile, two_sweeps = counts.N, counts.V, ROW_TILE[counts.device], counts.class_blocks
    room = free - accumulator_bytes(counts, way, bits)
    operand_classes = V
    if counts.weight_copy:
        # An eighth of the room for the copy, the rest for rows. On the CPU this is faster than a
        # quarter: fewer walks over the weight, and copies that stay nearer to its cache. It is no
        # slower than a sixteenth (decision 0026).
        copied = max(counts.smallest_copy, min(room // 8, room - counts.chunk(1)))
        operand_classes = _classes(copied, counts.weight_copy, V)
        room -= operand_classes * counts.weight_copy
    if way == "class_blocks" and two_sweeps is not None and N:
        rows, chunk_classes, product_rows, *of_block = class_blocks.sizes(two_sweeps, room, free)
        return Tiling(rows, chunk_classes, operand_classes, product_rows, way, bits, *of_block)
    rows = max(N, 1) if way == "single_product" else even_rows(counts.most_rows(room), N, tile)
    if counts.device == "cuda" and rows < N:
        rows = _quickest(counts, counts.most_rows(room), fewest_rows(counts, way, bits), way, bits)
    # Where ranks agree on smaller chunks, class blocks take the place of a single GEMM.
    block = _class_block(free, counts) if way in ("class_blocks", "single_product") else (0, 0)
    return Tiling(rows, V, operand_classes, counts.product_rows, way, bits, *block)


def _class_block(free: int, counts: ByteCounts) -> tuple[int, int]:
    """Return tokens and classes of a block.

    Its accumulator [B, D] and its logits [C, B] should be of about the same size.
    """
    of_a_class = counts.class_sum + counts.weight_copy
    classes = _classes(free // 2, of_a_class, counts.V)
    of_a_row = classes * counts.block_logit + counts.block_row
    return even_rows((free - classes * of_a_class) // of_a_row, counts.N, ROW_TILE[counts.device]), classes


def _classes(room: int, size: int, V: int) -> int:
    """Return the classes that fit: V, or whole tiles, as an odd width is slow (decision 0034)."""
    classes = max(1, min(V, room // max(1, size)))
    return classes if classes == V or classes < 128 else classes - classes % 128


def even_rows(most: int, N: int, tile: int) -> int:
    """Return rows per chunk, at most `most`, for few chunks of about equal size in whole tiles."""
    most = max(1, most)
    if most >= N:
        return max(N, 1)
    chunks = -(-N // (most - most % tile)) if most >= tile else -(-N // most)
    even = -(-N // chunks)
    return even if most < tile else -(-even // tile) * tile


@functools.lru_cache(maxsize=64)
def _quickest(counts: ByteCounts, most: int, fewest: int, way: WeightGradient, bits: int) -> int:
    """Return the rows per chunk with the least predicted time, among whole tiles that fit."""

    def seconds(rows: int) -> float:
        whole, rest = divmod(counts.N, rows)
        return whole * of_chunk(rows) + (of_chunk(rest) if rest else 0)

    def of_chunk(rows: int) -> float:
        return chunk_seconds(counts, rows, way, bits, counts.product_rows)

    tile = ROW_TILE["cuda"]
    first = -(-max(fewest, most // 2) // tile) * tile
    step = tile * max(1, (most - first) // (CANDIDATES * tile))
    return min(range(first, most + 1, step), key=seconds, default=even_rows(most, counts.N, tile))
