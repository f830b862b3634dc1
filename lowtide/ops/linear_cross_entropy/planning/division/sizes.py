"""Divide a workspace among chunks of tokens, blocks of classes and the accumulator of dW.

Chunks get the memory that the fixed parts (byte_counts.py) and the accumulator
(weight_gradient.py) leave. On the CPU a chunk has about as many rows as fit. On CUDA it has the
number of rows with the least predicted time, of those that fit.

Shapes: N tokens, D features, V classes.
"""

import functools
from collections.abc import Iterator
from dataclasses import replace

from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ROW_TILE, ByteCounts
from lowtide.ops.linear_cross_entropy.planning.division import class_blocks
from lowtide.ops.linear_cross_entropy.planning.division.cost_model import over_chunks
from lowtide.ops.linear_cross_entropy.planning.division.step_time import chunk_seconds, step_seconds
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling, WeightGradient
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import (
    ROUNDED_NUMBERS,
    accumulator_bytes,
    choose_sum_bits,
    choose_weight_gradient,
    fewest_rows,
    prefers_sum,
)

# Ignored rows may be skipped in calls of at least so many tokens, up to this ratio of the predicted
# time with skipping to that without, if no row is ignored.
FEWEST_TOKENS, MOST_OF_SKIPPING = 2048, 1.10  # decisions 0078 and 0084

# About this many chunk sizes are compared, in whole tiles between half of what fits and all of it.
CANDIDATES = 32


def choose_sizes(workspace: int, counts: ByteCounts) -> Tiling:
    """Return the sizes of a call in a workspace of `workspace` bytes.

    Ignored rows are skipped unless a call that ignores none would take too long by it.
    """
    takes_all, of_skipping = _choose_sizes(workspace, counts), counts.of_skipping()
    if not may_skip(counts) or workspace < of_skipping.smallest_workspace:
        return takes_all
    tiling = replace(_choose_sizes(workspace, of_skipping), skips_ignored=True)
    # The shapes of the operator's outputs are told before the plan is made, from the way without
    # skipping (weight_gradient_of). So both ways keep a float32 sum, or neither does.
    keeps_sum = (tiling.weight_gradient == "accumulate") == (takes_all.weight_gradient == "accumulate")
    most = MOST_OF_SKIPPING * step_seconds(counts, takes_all)
    if keeps_sum and tiling.weight_gradient != "class_blocks" and step_seconds(of_skipping, tiling) <= most:
        return tiling
    return takes_all


def may_skip(counts: ByteCounts) -> bool:
    """Return True if a call may skip ignored rows, where that takes little if none is ignored."""
    return counts.may_skip and counts.N >= FEWEST_TOKENS


def _choose_sizes(workspace: int, counts: ByteCounts) -> Tiling:
    if workspace < counts.smallest_workspace:
        held = f"one row of {counts.V} logits, and vectors of {counts.N} tokens and {counts.V} classes"
        raise too_small(workspace, counts.smallest_workspace, held)
    free = workspace - counts.fixed
    way, bits = choose_weight_gradient(workspace, counts), choose_sum_bits(free, counts)
    if counts.device == "cuda" and counts.class_blocks is not None and way in ("packed", "class_blocks"):
        return min(_without_float32_sum(free, counts, bits), key=functools.partial(step_seconds, counts))
    tiling = _sizes(free, counts, way, bits)
    if counts.device == "cuda" and tiling.rows < min(counts.N, fewest_rows(counts, way, bits)):
        return _sizes(free, counts, "class_blocks", bits)
    return tiling


def _without_float32_sum(free: int, counts: ByteCounts, bits: int) -> Iterator[Tiling]:
    """Yield the sizes of each way to form dW that fits, but for a float32 sum."""
    packed = counts.packed_bytes(bits)
    fewest = max(fewest_rows(counts, "packed", bits), ROW_TILE[counts.device])
    packs = packed and counts.most_rows(free - packed) >= min(counts.N, fewest)
    if packs:
        yield _sizes(free, counts, "packed", bits)
    one_product = counts.one_product_row and free >= counts.smallest_copy + counts.single_product()
    if one_product and not (packs and prefers_sum(counts, free)):
        yield _sizes(free, counts, "single_product", bits)
    yield _sizes(free, counts, "class_blocks", bits)


def too_small(workspace: int, least: int, held: str) -> ArgumentError:
    """Return the error for a workspace that cannot hold what the call needs."""
    return ArgumentError(
        f"workspace must hold {held}: {least} bytes in this call, got {workspace} bytes; "
        "pass more, or None for the default"
    )


def tiling_bytes(counts: ByteCounts, tiling: Tiling) -> int:
    """Return the peak bytes of a call of these sizes.

    The float32 sum of dW ("accumulate") is not counted, because the call returns it.
    """
    if tiling.skips_ignored:
        counts = counts.of_skipping()
    way, two_sweeps = tiling.weight_gradient, counts.class_blocks
    copies = tiling.operand_classes * counts.weight_copy
    if way == "class_blocks" and two_sweeps is not None:
        return counts.fixed + class_blocks.held(two_sweeps, tiling)
    if way == "class_blocks":
        block = counts.class_block(tiling.block_rows, tiling.block_classes)
        return counts.fixed + max(counts.chunk(tiling.rows) + copies, block)
    if way == "single_product":
        block = tiling.block_classes * counts.class_sum if counts.rounded_block else 0
        return counts.fixed + counts.single_product(block) + copies
    beside = accumulator_bytes(counts, way, tiling.sum_bits) if way == "packed" else 0
    return counts.fixed + counts.chunk(tiling.rows) + copies + beside


def _sizes(free: int, counts: ByteCounts, way: WeightGradient, bits: int) -> Tiling:
    """Return the sizes for `free` bytes if the weight gradient is formed in this way."""
    N, V, tile, two_sweeps = counts.N, counts.V, ROW_TILE[counts.device], counts.class_blocks
    room = free - accumulator_bytes(counts, way, bits)
    operand_classes = V
    if counts.weight_copy:
        # The copy gets an eighth of the room, and rows get the rest. On the CPU an eighth is faster
        # than a quarter: there are fewer chunks, each of which reads the whole weight, and smaller
        # copies stay in the cache. An eighth is no slower than a sixteenth (decision 0026).
        copied = max(counts.smallest_copy, min(room // 8, room - counts.chunk(1)))
        operand_classes = _classes(copied, counts.weight_copy, V)
        room -= operand_classes * counts.weight_copy
    if way == "class_blocks" and two_sweeps is not None and N:
        found = class_blocks.sizes(two_sweeps, room, free)
        return Tiling(operand_classes=operand_classes, weight_gradient=way, sum_bits=bits, **found._asdict())
    single = way == "single_product"
    most = (counts.rows_of_logits or N) if single else counts.most_rows(room)
    # Each chunk reads the whole weight. Of few rows, whole tiles might leave half to more chunks.
    rows = even_rows(most, N, tile // 8 if single and most < 4 * tile else tile)
    if counts.device == "cuda" and rows < N and not single:
        rows = _quickest(counts, counts.most_rows(room), fewest_rows(counts, way, bits), way, bits)
    # Where ranks agree on smaller chunks, class blocks take the place of a single GEMM.
    block, sum_room = (0, 0), free // 2
    if way == "single_product" and counts.rounded_block:
        beside = room - counts.single_product() + counts.rounded_block
        in_cache = max(ROUNDED_NUMBERS * counts.class_sum // counts.D, counts.rounded_block)
        sum_room = min(beside, in_cache)
    if way in ("class_blocks", "single_product"):
        block = _class_block(free, counts, sum_room)
    return Tiling(rows, V, operand_classes, counts.product_rows, way, bits, *block)


def _class_block(free: int, counts: ByteCounts, sum_room: int) -> tuple[int, int]:
    """Return the tokens C and classes B of a block.

    Its accumulator [B, D] and a copy of its weight get `sum_room` bytes, and its logits [C, B] the
    rest.
    """
    of_a_class = counts.class_sum + counts.weight_copy
    classes = _classes(sum_room, of_a_class, counts.V)
    of_a_row = classes * counts.block_logit + counts.block_row
    return even_rows((free - classes * of_a_class) // of_a_row, counts.N, ROW_TILE[counts.device]), classes


def _classes(room: int, size: int, V: int) -> int:
    """Return how many classes of `size` bytes fit.

    If less than V, this is a multiple of 128 or below 128, because other widths are slow (decision
    0034).
    """
    classes = max(1, min(V, room // max(1, size)))
    return classes if classes == V or classes < 128 else classes - classes % 128


def even_rows(most: int, N: int, tile: int) -> int:
    """Return the rows per chunk for the fewest chunks of about equal size, in whole tiles.

    A chunk has at most `most` rows.
    """
    most = max(1, most)
    if most >= N:
        return max(N, 1)
    chunks = -(-N // (most - most % tile)) if most >= tile else -(-N // most)
    even = -(-N // chunks)
    return even if most < tile else -(-even // tile) * tile


@functools.lru_cache(maxsize=64)
def _quickest(counts: ByteCounts, most: int, fewest: int, way: WeightGradient, bits: int) -> int:
    """Return the rows per chunk with the least predicted time, in whole tiles.

    They are at most `most`, and at least `fewest` or half of `most`, whichever is more. They are
    those of a call that forms dW: what the sum takes per chunk stands for launches, too.
    """
    counts = replace(counts, forms_dw=True)

    def seconds(rows: int) -> float:
        return over_chunks(counts.N, rows, of_chunk)

    def of_chunk(rows: int) -> float:
        return chunk_seconds(counts, rows, way, bits, counts.product_rows)

    tile = ROW_TILE["cuda"]
    first = -(-max(fewest, most // 2) // tile) * tile
    step = tile * max(1, (most - first) // (CANDIDATES * tile))
    return min(range(first, most + 1, step), key=seconds, default=even_rows(most, counts.N, tile))
