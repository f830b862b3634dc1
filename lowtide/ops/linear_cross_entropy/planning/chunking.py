"""Divide a workspace of a given number of bytes among chunks of tokens, blocks of classes and sums.

    fixed       vectors of N and V elements
    sum         the accumulator of a rounded weight gradient, in one of these forms: float32 [V, D],
                if that fits and the Gluon pipeline, which is faster with 24 bits, does not run;
                else partly in the gradient's memory, with 24 bits and one byte per weight beyond
                it, or with 20 bits and half a byte (packed_triton.py); on the CPU with half of its
                own size beyond it (in_place.py)
    per row     the logits of a token, and copies of its features and their gradient if dtypes or
                strides require them
    shared      one buffer of the exponentials engine: first the partial sums of tiles, then the
                rows of a dX GEMM, then the partial products of a narrow second term
    copy        a block of the weight, if a GEMM cannot read its dtype or strides

There is no sum where one chunk has room for all tokens, tokens are few beside the classes, and no
term is spread over all classes: the exponentials engine then rounds in the epilogue of a single
GEMM (accumulators.py).

All remaining memory is spent on rows. Where every kind of sum leaves too few rows, the weight
gradient is formed by blocks of classes instead: as exact, at the price of one more GEMM.
class_blocks.py has the sizes of the exponentials engine for that.

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

# The default workspace is no more than the dense computation would hold, but at least this much above
# the smallest plan: on CUDA, the allocation granularity.
LEAST_ROOM = {"cpu": 1 << 16, "cuda": 1 << 17}
# And at least this much where it would be spent on few rows or few classes at a time. Such a plan was
# 10 to 100 times slower on the CPU; with this room it takes at most 1.5 times as long as with the
# whole default.
ROOM, ROWS, CHUNKS, CLASSES = {"cpu": 4 * MIB, "cuda": 16 * MIB}, 32, 64, 128
# With a single GEMM over all tokens, the dense computation may hold nothing but their exponentials
# beside a larger weight gradient. This GEMM takes as many bytes more per token, per feature and per
# class.
BESIDE_ONE_PRODUCT = 256

# With fewer rows per chunk, reading the weight and its sum costs more than one recomputed GEMM.
FEWEST_ROWS = {"cpu": 64, "cuda": 512}

# A sum that lies partly in the gradient's memory leaves room for more rows per chunk than a float32
# sum, so it is added to less often. In Triton each addition takes longer, so a float32 sum is
# preferred if its chunks have this many rows. (8192 rows per chunk with 24 bits still make a step 2
# to 3 % faster than 4096 rows with float32.) On the Gluon pipeline an addition takes less time than
# cuBLAS with float32, so there the packed sum is tried first. On the CPU an addition is no faster,
# and the sum is rounded before backward's factor is known.
FEWEST_ROWS_OF_SUM = {"cpu": 512, "cuda": 8192}  # decision 0044

# A sum with 20 bits leaves room for longer chunks than one with 24. Its rounding error is 2^-12 of
# what a chunk adds. In the row of a frequent class, where probabilities and targets cancel, this
# exceeds the rounding of the gradient if chunks are long. So use 24 bits where they leave this many
# rows per chunk, and 20 bits for at most this many chunks.
ENOUGH_ROWS, MOST_CHUNKS_OF_20_BITS = 2048, 64  # decision 0036

# Most bytes of the exponentials of a chunk; with more, a step of shape A took 1 % longer, of D 1 to
# 3 %.
MOST_BYTES = 2 << 30  # decision 0044

# Target classes whose rows of the gradient are formed at a time with a single GEMM over all tokens.
TARGETS = 512  # decision 0016

# Most features of a second term whose two GEMMs are formed together, and classes of a strip; each
# strip yields one partial sum of a product (low_rank_triton.py).
NARROW, STRIP = 16, 512  # decision 0045

# How a weight gradient is formed: by a single GEMM over all tokens that rounds in its epilogue; by
# adding each chunk's GEMM to a tensor of the sum's dtype; the same with a sum partly in the
# gradient's memory; or by blocks of classes, each rounded once.
WeightGradient = Literal["at_once", "accumulate", "split", "by_class"]

# Number of chunk sizes that are compared, between half of what fits and all of it.
CANDIDATES = 32

# Tensor-core tiles are 128 rows high. The height of the CPU's row block matters less.
ROW_TILE = {"cpu": 8, "cuda": 128}


@dataclass(frozen=True, slots=True)
class Needs:
    """Hold the memory that each part of one call takes, in bytes unless stated."""

    N: int  # tokens
    D: int  # features
    V: int  # classes
    device: str
    fixed: int
    """Bytes of the vectors, whatever the sizes."""
    row: int
    """Bytes per token of a chunk, held as long as the chunk lasts."""
    weight_sum: int
    """Bytes of the float32 accumulator of a rounded weight gradient; 0 if none is rounded."""
    weight_copy: int
    """Bytes of the copy of one class, in the operands' dtype; 0 if no copy is needed."""
    class_sum: int
    """Bytes of the float32 accumulator of one class, [D]."""
    block_logit: int
    """Bytes of one logit and its gradient in a class block."""
    block_row: int
    """Other bytes per token of a class block."""
    split_sum: int = 0
    """Bytes of a packed sum beyond the gradient's memory; 0 if the engine has no such sum."""
    split_sum_20: int = 0
    """The same with 20 bits, where `split_sum` is with 24; 0 if there is only one form."""
    at_once: int = 0
    """Bytes of a single GEMM over all tokens beyond its operands, freed before the dX GEMM.

    0 if the engine has no such GEMM.
    """
    found: int = 0
    """Bytes per token of tile partial sums; freed before the dX GEMM."""
    product: int = 0
    """Bytes per row of the float32 result of the dX GEMM."""
    product_rows: int = 0
    """Most rows of one dX GEMM (tokens, not bytes)."""
    longest: int = 0
    """Most tokens of a chunk; 0 for no limit."""
    pipelined: bool = False
    """True if the Gluon pipeline forms a 24-bit sum from chunks of ENOUGH_ROWS.

    N is not asked, because it may be a symbol.
    """
    of_strips: int = 0
    """Bytes per token of a narrow term's partial products, one per strip; 0 without one."""
    recomputed: int = 1
    """Number of GEMMs that class blocks recompute (not bytes)."""
    class_blocks: ClassBlocks | None = None
    """Memory of the two sweeps, in the exponentials engine."""

    def chunk(self, rows: int) -> int:
        """Return the bytes of a chunk of so many rows."""
        return rows * self.row + self.in_turn(rows)

    def of_all_tokens(self) -> int:
        """Return the bytes of one chunk of all tokens with a single GEMM for dW.

        The gradient rows of target classes are formed before the dX GEMM, in the same memory.
        """
        return self.N * self.row + max(self.in_turn(self.N), self.at_once)

    def in_turn(self, rows: int) -> int:
        """Return the bytes of the buffer that tile partial sums and then dX GEMMs share.

        The partial products of a narrow term use it too, as many rows at a time as fit.
        """
        return max(rows * self.found, min(rows, self.product_rows) * self.product)

    def most_rows(self, room: int) -> int:
        """Return the largest number of rows whose chunk fits in `room` bytes."""
        at_once = room // (self.row + max(self.found, self.product))
        in_pieces = (room - self.product_rows * self.product) // self.row
        most = max(at_once, min(in_pieces, room // (self.row + self.found)))
        return min(most, self.longest) if self.longest else most


@dataclass(frozen=True, slots=True)
class Sizes:
    """Hold the sizes that a workspace allows; planner.py's Plan explains each field."""

    rows: int
    chunk_classes: int
    operand_classes: int
    product_rows: int
    weight_gradient: WeightGradient
    sum_bits: int
    block_rows: int
    block_classes: int


def allowed(workspace: int | None, device: str, weight_sum: int = 0, narrow: int = 0) -> int:
    """Return the bytes that a call may use: the workspace asked for, or else the default.

    The default does not include what narrow terms need nor, on CUDA, the float32 sum.
    """
    if workspace is not None:
        return workspace
    default = DEFAULT_WORKSPACE["cuda"] + weight_sum if device == "cuda" else DEFAULT_WORKSPACE["cpu"]
    return default + narrow


def granted(workspace: int | None, dense: int | None, needs: Needs, narrow: int = 0) -> int:
    """Return the workspace of this call in bytes: what was asked for, or else the default.

    The default is limited to what the dense computation would hold, where that is known, as long as
    there is room for enough rows and classes at a time.
    """
    most = allowed(workspace, needs.device, needs.weight_sum, narrow)
    if workspace is not None or dense is None or dense >= most:
        return most
    if needs.at_once:
        dense += BESIDE_ONE_PRODUCT * (needs.N + needs.D + needs.V)
    smallest = least(needs)
    limited = min(most, max(dense, smallest + LEAST_ROOM[needs.device]))
    if _runs_in_few_pieces(spend(limited, needs), needs):
        return limited
    return min(most, max(limited, smallest + ROOM[needs.device]))


def _runs_in_few_pieces(sizes: "Sizes", needs: Needs) -> bool:
    """Return whether chunks and blocks are large enough for GEMMs, or as large as the call."""
    rows, classes = min(max(ROWS, needs.N // CHUNKS), needs.N), min(CLASSES, needs.V)
    if sizes.weight_gradient == "by_class":
        rows_at_once, classes_at_once = sizes.block_rows, sizes.block_classes
    else:
        rows_at_once, classes_at_once = sizes.rows, sizes.operand_classes
    return sizes.rows >= rows and rows_at_once >= rows and classes_at_once >= classes


def too_small(workspace: int, least: int, held: str) -> ArgumentError:
    """Return the error for a workspace that cannot hold what the call needs."""
    return ArgumentError(
        f"workspace must hold {held}: {least} bytes in this call, got {workspace} bytes; "
        "pass more, or None for the default"
    )


def weight_gradient(workspace: int, needs: Needs) -> WeightGradient:
    """Return the first way to form dW that fits and leaves room for chunks of enough rows."""
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
    """Return the bytes of a packed sum with this many bits."""
    return (bits == 20 and needs.split_sum_20) or needs.split_sum


def _least_copy(needs: Needs) -> int:
    # A copy smaller than one row of logits would divide one large GEMM into many small ones.
    return min(needs.V * needs.weight_copy, max(needs.row, needs.weight_copy))


def least(needs: Needs) -> int:
    """Return the smallest workspace that the call runs in."""
    row = needs.chunk(1)
    if needs.class_blocks is not None:
        row = max(row, needs.class_blocks.of_chunk(1, needs.V))
    return needs.fixed + row + _least_copy(needs) + (2 * needs.class_sum if needs.weight_sum else 0)


def spend(workspace: int, needs: Needs, kind: WeightGradient | None = None) -> Sizes:
    """Return the sizes for a workspace; `kind` if the way to form dW is decided already."""
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
        # An eighth of the room for the copy, the rest for rows. On the CPU this is faster than a
        # quarter: fewer walks over the weight, and copies that stay nearer to its cache. It is no
        # slower than a sixteenth (decision 0026).
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

    # In a class block the accumulator [B, D] and the logits [C, B] should be of about the same
    # size.
    of_a_class = needs.class_sum + needs.weight_copy
    block_classes = _classes(free // 2, of_a_class, V)
    of_a_row = block_classes * needs.block_logit + needs.block_row
    block_rows = _rows((free - block_classes * of_a_class) // of_a_row, N, tile)
    return Sizes(rows, V, operand_classes, needs.product_rows, kind, bits, block_rows, block_classes)


def _beside(needs: Needs, kind: WeightGradient, bits: int) -> int:
    """Return the bytes of the accumulator of the weight gradient, in whatever form."""
    if kind == "accumulate":
        return needs.weight_sum
    return _split_sum(needs, bits) if kind == "split" else 0


def spent(needs: Needs, sizes: Sizes) -> int:
    """Return the peak bytes of a call of these sizes, without a float32 sum that it returns."""
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
    """Return the classes that fit: V, or whole tiles, as an odd width is slow (decision 0034)."""
    classes = max(1, min(V, room // max(1, size)))
    return classes if classes == V or classes < 128 else classes - classes % 128


def _rows(most: int, N: int, tile: int) -> int:
    """Return the rows per chunk if `most` fit: few chunks of about equal size, in whole tiles."""
    most = max(1, most)
    if most >= N:
        return max(N, 1)
    chunks = -(-N // (most - most % tile)) if most >= tile else -(-N // most)
    even = -(-N // chunks)
    return even if most < tile else -(-even // tile) * tile


def _bytes_of_sum(needs: Needs, kind: WeightGradient, bits: int) -> int:
    """Return the bytes of the sum to which each chunk adds its share of dW; 0 if none is wanted."""
    if kind == "accumulate":
        return needs.V * needs.class_sum
    return 2 * needs.V * needs.D + _split_sum(needs, bits) if kind == "split" else 0


@functools.lru_cache(maxsize=64)
def _quickest(needs: Needs, most: int, fewest: int, bytes_of_sum: int) -> int:
    """Return the rows per chunk with the least predicted time, among whole tiles that fit.

    The chunk size affects the dW GEMMs only by how often they are added to the sum.
    """

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
