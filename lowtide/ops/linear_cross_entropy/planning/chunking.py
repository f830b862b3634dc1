"""How a workspace of so many bytes is spent on chunks of tokens and blocks of classes.

    fixed       vectors of N and V elements
    sum         the float32 sum of a rounded weight gradient, [V, D], where there is room for it and no
                pipeline, which is quicker in 24 bits; else what it takes beside the gradient's own memory,
                where there is room for that: in 24 bits a byte for each weight, in 20 half of one
                (packed_triton.py), on the CPU half of itself (in_place.py)
    per row     the logits of a token; copies of its features and their gradient where dtypes or strides ask
    piece       of the product that becomes the input's gradient, on the path without a pass; what is summed
                up of each tile of logits has the same room before, a narrow second term's product after
    copy        of a block of the weight, where its dtype or strides do not suit the products

Where one chunk has room for all tokens, these are few beside the classes, and nothing is spread over all
classes, there is no sum: the path without a pass rounds in its product (accumulators.py).
Whatever the others leave is spent on rows. Where either sum leaves too few of them, the weight's gradient is
formed class block by class block instead: exact as well, for one more product (class_blocks.py has the
sizes of the path without a pass).

Shapes: N tokens, D features, V classes.
"""

import functools
from dataclasses import dataclass
from typing import Literal

from lowtide.core.errors import ArgumentError
from lowtide.core.matmul import PRODUCT_ROWS
from lowtide.ops.linear_cross_entropy.planning import class_blocks, cost_model
from lowtide.ops.linear_cross_entropy.planning.class_blocks import ClassBlocks

MIB = 1 << 20
DEFAULT_WORKSPACE = {"cpu": 64 * MIB, "cuda": 1024 * MIB}

# The default is no more than the dense computation would hold, but at least this: what vectors and numbers
# take beside few logits, and on CUDA the grain of the allocator.
LEAST_DEFAULT = {"cpu": 1 << 16, "cuda": 1 << 17}
# The exponentials of all tokens are all that the dense computation holds beside a gradient of the weight that
# is larger. One product of them takes as many bytes more for each token, feature and class.
BESIDE_ONE_PRODUCT = 256

# With fewer rows a chunk, reading the weight and its sum costs more than one recomputed product.
FEWEST_ROWS = {"cpu": 64, "cuda": 512}

# A sum that lies partly in the gradient's memory leaves room for more rows at a time than one of its own, and
# is added to less often. On CUDA in Triton each time takes longer (8192 rows at a time in 24 bits still take
# 2 to 3 % of a step less than 4096 in float32); on the pipeline, less long than cuBLAS in float32, so that it
# comes first there. On the CPU not, but it is rounded before backward's factor is known.
FEWEST_ROWS_OF_SUM = {"cpu": 512, "cuda": 8192}  # decision 0044

# A sum in 20 bits leaves room for longer chunks than one in 24, and is rounded by 2^-12 of what a chunk adds
# to it: in the row of a frequent class, where probabilities and targets cancel, that is more than what rounds
# the gradient if the chunk is long. So 24 bits where these leave as many rows as this; and at most so many
# chunks of fewer.
ENOUGH_ROWS, MOST_CHUNKS_OF_20_BITS = 2048, 64  # decision 0036

# Of the exponentials of a chunk; of more, a step of A took 1 % longer, of D 1 to 3.
MOST_BYTES = 2 << 30  # decision 0044

# Targets whose rows of the gradient are formed at a time where one product has all tokens.
TARGETS = 512  # decision 0016

# Features of a second term whose two products are made at once, at most, and classes of a strip: of one
# product each strip has a part (low_rank_triton.py).
NARROW, STRIP = 16, 512  # decision 0045

WeightGradient = Literal["at_once", "accumulate", "split", "by_class"]

# Sizes of a chunk that are compared, between half of what fits and all.
CANDIDATES = 32

# Tensor-core tiles are 128 rows high; the CPU's row block matters less.
ROW_TILE = {"cpu": 8, "cuda": 128}


@dataclass(frozen=True, slots=True)
class Needs:
    """Of one call, in bytes unless said."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    device: str
    fixed: int
    row: int
    """Of a token of a chunk, as long as the chunk lasts."""
    weight_sum: int
    """The float32 sum of a weight gradient that is rounded in the end; 0 where none is."""
    weight_copy: int
    """Of one class, in the operands' dtype; 0 where no copy is needed."""
    class_sum: int
    """Of the float32 sum of one class, [D]."""
    block_logit: int
    """Of one logit, and its gradient, in a tile of a class block."""
    block_row: int
    """Of one token beside its logits in such a tile."""
    split_sum: int = 0
    """What the sum takes beside the gradient where it uses its memory; 0 where the path has no such sum."""
    split_sum_20: int = 0
    """In 20 bits, where that is in 24; 0 where there is one way."""
    at_once: int = 0
    """What one product for all tokens takes beside its operands, before those of dX; 0 where the path cannot
    round in it."""
    found: int = 0
    """Of a token beside `row`, until dX's products are taken."""
    product: int = 0
    """Of a token of such a product."""
    product_rows: int = 0
    """Tokens, not bytes: of such a product, at most."""
    longest: int = 0
    """Tokens, not bytes: of a chunk, at most; 0 for any number."""
    pipelined: bool = False
    """Whether a sum in 24 bits is formed on the pipeline by chunks of ENOUGH_ROWS; N may be a symbol, and is
    not asked."""
    of_strips: int = 0
    """Of a token, what strips of classes have of a narrow term's product; 0 without one."""
    recomputed: int = 1
    """Products, not bytes: what class blocks cost."""
    class_blocks: ClassBlocks | None = None
    """On the path without a pass."""

    def chunk(self, rows: int) -> int:
        return rows * self.row + self.in_turn(rows)

    def of_all_tokens(self) -> int:
        """One product for all of them: the rows of their targets are formed before those of dX."""
        return self.N * self.row + max(self.in_turn(self.N), self.at_once)

    def in_turn(self, rows: int) -> int:
        """What the one and the other take, in the same room; and strips, as many rows at a time as fit."""
        return max(rows * self.found, min(rows, self.product_rows) * self.product)

    def most_rows(self, room: int) -> int:
        """Of a chunk that takes no more."""
        at_once = room // (self.row + max(self.found, self.product))
        in_pieces = (room - self.product_rows * self.product) // self.row
        most = max(at_once, min(in_pieces, room // (self.row + self.found)))
        return min(most, self.longest) if self.longest else most


@dataclass(frozen=True, slots=True)
class Sizes:
    rows: int
    chunk_classes: int
    operand_classes: int
    product_rows: int
    weight_gradient: WeightGradient
    sum_bits: int
    block_rows: int
    block_classes: int


def allowed(workspace: int | None, device: str, weight_sum: int = 0, narrow: int = 0) -> int:
    """Bytes: what was asked for, or the default, which leaves what narrow terms need out of account, and on
    CUDA the float32 sum."""
    if workspace is not None:
        return workspace
    default = DEFAULT_WORKSPACE["cuda"] + weight_sum if device == "cuda" else DEFAULT_WORKSPACE["cpu"]
    return default + narrow


def granted(workspace: int | None, dense: int | None, needs: Needs, narrow: int = 0) -> int:
    """Bytes of this call: what was asked for, or the default, which is no more than the dense computation
    would hold where that is known, as long as vectors leave room for rows. (Of few classes a token's vectors
    take more than its logits, and one row at a time would take all day.)"""
    most = allowed(workspace, needs.device, needs.weight_sum, narrow)
    if workspace is not None or dense is None or dense >= most:
        return most
    beside_vectors = needs.fixed + min(dense, needs.fixed)
    if needs.at_once:
        dense += BESIDE_ONE_PRODUCT * (needs.N + needs.D + needs.V)
    return min(most, max(dense, beside_vectors, least(needs), LEAST_DEFAULT[needs.device]))


def too_small(workspace: int, least: int, held: str) -> ArgumentError:
    return ArgumentError(
        f"workspace must hold {held}: {least} bytes in this call, got {workspace} bytes; "
        "pass more, or None for the default"
    )


def weight_gradient(workspace: int, needs: Needs) -> WeightGradient:
    """The first whose memory fits, and leaves room for chunks that are worth it."""
    if needs.weight_sum == 0:
        return "accumulate"
    fewest = FEWEST_ROWS[needs.device] // needs.recomputed
    room = workspace - needs.fixed - _least_copy(needs)
    if needs.at_once and room >= needs.of_all_tokens():
        return "at_once"
    if needs.pipelined and room >= needs.split_sum + needs.chunk(ENOUGH_ROWS):
        return "split"
    fewest_of_sum = FEWEST_ROWS_OF_SUM[needs.device] if needs.split_sum else fewest
    if room >= needs.weight_sum + needs.chunk(fewest_of_sum):
        return "accumulate"
    split_sum = _split_sum(needs, 20)
    return "split" if split_sum and room >= split_sum + needs.chunk(fewest) else "by_class"


def _split_sum(needs: Needs, bits: int) -> int:
    return (bits == 20 and needs.split_sum_20) or needs.split_sum


def _least_copy(needs: Needs) -> int:
    # A copy of fewer bytes than a row's logits would make many small products of one large one.
    return min(needs.V * needs.weight_copy, max(needs.row, needs.weight_copy))


def least(needs: Needs) -> int:
    row = needs.chunk(1)
    if needs.class_blocks is not None:
        row = max(row, needs.class_blocks.of_chunk(1, needs.V))
    return needs.fixed + row + _least_copy(needs) + (2 * needs.class_sum if needs.weight_sum else 0)


def spend(workspace: int, needs: Needs, kind: WeightGradient | None = None) -> Sizes:
    """`kind`, where it has been decided."""
    N, V, tile = needs.N, needs.V, ROW_TILE[needs.device]
    if workspace < least(needs):
        held = f"one row of {V} logits, and vectors of {N} tokens and {V} classes"
        raise too_small(workspace, least(needs), held)

    free = workspace - needs.fixed
    kind = weight_gradient(workspace, needs) if kind is None else kind
    enough = needs.most_rows(free - needs.split_sum) >= min(N, ENOUGH_ROWS)
    bits = 24 if enough or not needs.split_sum_20 else 20
    room = free - _beside(needs, kind, bits)
    operand_classes = V
    if needs.weight_copy:
        # An eighth of the room for the copy, the rest for rows: on the CPU quicker than a quarter (fewer
        # walks over the weight, copies nearer to its cache), and no slower than a sixteenth (decision 0026).
        copied = max(_least_copy(needs), min(room // 8, room - needs.chunk(1)))
        operand_classes = _classes(copied, needs.weight_copy, V)
        room -= operand_classes * needs.weight_copy
    if kind == "by_class" and needs.class_blocks is not None and N:
        rows = _rows(room // needs.class_blocks.of_chunk(1, V), N, tile)
        rows, chunk_classes = class_blocks.chunk(needs.class_blocks, room, rows)
        block_rows, block_classes = class_blocks.block(needs.class_blocks, free)
        return Sizes(rows, chunk_classes, operand_classes, rows, kind, bits, block_rows, block_classes)
    rows = max(N, 1) if kind == "at_once" else _rows(needs.most_rows(room), N, tile)
    if needs.device == "cuda" and rows < N:
        fewest = -(-N // MOST_CHUNKS_OF_20_BITS) if kind == "split" and bits == 20 else 1
        rows = _quickest(needs, needs.most_rows(room), fewest, _bytes_of_sum(needs, kind, bits))
        if rows < fewest:
            return spend(workspace, needs, "by_class")

    # A class block wants its sum [B, D] and its logits [C, B] of about the same size.
    of_a_class = needs.class_sum + needs.weight_copy
    block_classes = _classes(free // 2, of_a_class, V)
    of_a_row = block_classes * needs.block_logit + needs.block_row
    block_rows = _rows((free - block_classes * of_a_class) // of_a_row, N, tile)
    return Sizes(rows, V, operand_classes, needs.product_rows, kind, bits, block_rows, block_classes)


def _beside(needs: Needs, kind: WeightGradient, bits: int) -> int:
    """Bytes of the weight gradient's sum, or of what takes its place."""
    if kind == "accumulate":
        return needs.weight_sum
    return _split_sum(needs, bits) if kind == "split" else 0


def spent(needs: Needs, sizes: Sizes) -> int:
    """Bytes held at the highest moment of a call of these sizes, without a float32 sum that it returns."""
    copies = sizes.operand_classes * needs.weight_copy
    kind = sizes.weight_gradient
    chunk = (needs.of_all_tokens() if kind == "at_once" else needs.chunk(sizes.rows)) + copies
    if kind != "accumulate":
        chunk += _beside(needs, kind, sizes.sum_bits)
    block = 0
    if kind == "by_class" and needs.class_blocks is not None:
        chunk = needs.class_blocks.of_chunk(sizes.rows, sizes.chunk_classes)
        block = needs.class_blocks.of_block(sizes.block_rows, sizes.block_classes)
    elif kind == "by_class":
        of_a_row = sizes.block_classes * needs.block_logit + needs.block_row
        block = sizes.block_rows * of_a_row + sizes.block_classes * (needs.class_sum + needs.weight_copy)
    return needs.fixed + max(chunk, block)


def _classes(room: int, size: int, V: int) -> int:
    """As many as fit; fewer than V in whole tiles, as an odd width is slow (decision 0034)."""
    classes = max(1, min(V, room // max(1, size)))
    return classes if classes == V or classes < 128 else classes - classes % 128


def _rows(most: int, N: int, tile: int) -> int:
    """Rows per chunk, where `most` fit: few chunks of about the same size, in whole tiles."""
    most = max(1, most)
    if most >= N:
        return max(N, 1)
    chunks = -(-N // (most - most % tile)) if most >= tile else -(-N // most)
    even = -(-N // chunks)
    return even if most < tile else -(-even // tile) * tile


def _bytes_of_sum(needs: Needs, kind: WeightGradient, bits: int) -> int:
    """That a chunk adds its share of the weight's gradient to; 0 where none is wanted."""
    if kind == "accumulate":
        return needs.V * needs.class_sum
    return 2 * needs.V * needs.D + _split_sum(needs, bits) if kind == "split" else 0


@functools.lru_cache(maxsize=64)
def _quickest(needs: Needs, most: int, fewest: int, bytes_of_sum: int) -> int:
    """Rows per chunk, of those that fit in whole tiles, by the time that all chunks should take. (Of products
    of the weight's gradient nothing depends on how tokens are cut but how often they are added up.)"""

    def seconds(rows: int) -> float:
        whole, rest = divmod(needs.N, rows)
        return whole * of_chunk(rows) + (of_chunk(rest) if rest else 0)

    def of_chunk(rows: int) -> float:
        logits = cost_model.exponentials(rows, needs.V, needs.D)
        product = cost_model.product_of_rows(rows, needs.D, needs.V, most=most_at_once)
        return logits + product + cost_model.addition(bytes_of_sum)

    tile, most_at_once = ROW_TILE["cuda"], needs.product_rows or PRODUCT_ROWS
    first = -(-max(fewest, most // 2) // tile) * tile
    step = tile * max(1, (most - first) // (CANDIDATES * tile))
    return min(range(first, most + 1, step), key=seconds, default=_rows(most, needs.N, tile))
