"""Choose how the weight gradient is formed, by what its accumulator leaves to the rows of a chunk.

The accumulator of a rounded weight gradient has one of these forms: float32 [V, D], if that fits
and the Gluon pipeline, which is faster with 24 bits, does not run; else partly in the gradient's
memory, with 24 bits and one byte per weight beyond it, or with 20 bits and half a byte
(packed_triton.py); on the CPU with half of its own size beyond it (in_torch.py).

There is no accumulator where one chunk has room for all tokens, tokens are few beside the classes,
and no term is spread over all classes: the exponentials engine then rounds in the epilogue of a
single GEMM (accumulators.py). On a CPU with bfloat16 units the single GEMM is rounded block by
block of classes (in_torch.py), and tokens that are not few take it where no sum has room.

Where every kind of sum leaves too few rows, the weight gradient is formed by blocks of classes
instead: as exact, at the price of one more GEMM.
"""

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.tiling import WeightGradient

# A single GEMM over all tokens may form dW from so many classes per token on.
FEWEST_CLASSES_PER_TOKEN = 4  # decisions 0073 and 0088

# On the CPU a single GEMM over all tokens is rounded from a float32 block of at least so many
# classes, and of at most so many numbers, which stay in the cache.
ROUNDED_CLASSES, ROUNDED_NUMBERS = 512, 1 << 20  # decision 0083

# Where dW's memory holds the logits of fewer than all tokens before a single GEMM, a float32 sum is
# preferred if its chunks have so many times as many rows.
LONGER_WITH_SUM = 4  # decision 0098

# With more tokens, two chunks with a packed sum on the Gluon pipeline take about as long as one
# GEMM over all tokens, and a quarter to a third less memory: the sum is read while operands arrive.
MOST_TOKENS_OF_ONE_PRODUCT = 6144  # decision 0016

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


def choose_weight_gradient(workspace: int, counts: ByteCounts) -> WeightGradient:
    """Return the first way to form dW that fits and leaves room for chunks of enough rows.

    If this is "packed" or "class_blocks", sizes.py chooses once more by predicted time, between
    these and "single_product".
    This uses N as little as possible, because N may be symbolic.
    """
    if counts.weight_sum == 0:
        return "accumulate"
    fewest = FEWEST_ROWS[counts.device] // counts.recomputed
    room = workspace - counts.fixed - counts.smallest_copy
    packs = counts.pipelined_rows > 0 and room >= counts.packed_sum + counts.chunk(counts.pipelined_rows)
    one_product = counts.one_product_row and room >= counts.single_product()
    if one_product and not prefers_sum(counts, room):
        return "single_product"
    if packs:
        return "packed"
    fewest_of_sum = FEWEST_ROWS_OF_SUM[counts.device] if counts.packed_sum else fewest
    if room >= counts.weight_sum + counts.chunk(fewest_of_sum):
        return "accumulate"
    packed = counts.packed_bytes(20)
    if packed and room >= packed + counts.chunk(fewest):
        return "packed"
    return "single_product" if one_product else "class_blocks"


def prefers_sum(counts: ByteCounts, room: int) -> bool:
    """Return True if chunks with a sum are preferred to one GEMM over all tokens.

    The sum has 24 bits, or is float32 where there are none. Chunks and sum get `room` bytes. On a
    CPU any sum is preferred with many tokens.
    """
    if counts.rounded_block:
        return counts.N * FEWEST_CLASSES_PER_TOKEN > counts.V
    if counts.own_logits_row:  # several chunks, whose logits lie in dW's memory
        longer = min(counts.N, LONGER_WITH_SUM * counts.rows_of_logits)
        return counts.most_rows(room - counts.weight_sum) >= longer
    if not counts.pipelined_rows or counts.N <= MOST_TOKENS_OF_ONE_PRODUCT:
        return False
    rows = counts.most_rows(room - counts.packed_sum)
    return counts.pipelined_rows <= rows < counts.N


def choose_sum_bits(free: int, counts: ByteCounts) -> int:
    """Return the bits of a packed sum: 24, unless only 20 leave room for chunks of enough rows."""
    enough = counts.most_rows(free - counts.packed_sum) >= min(counts.N, ENOUGH_ROWS)
    return 24 if enough or not counts.packed_sum_20 else 20


def fewest_rows(counts: ByteCounts, way: WeightGradient, bits: int) -> int:
    """Return the fewest rows per chunk that are exact enough."""
    return -(-counts.N // MOST_CHUNKS_OF_20_BITS) if way == "packed" and bits == 20 else 1


def accumulator_bytes(counts: ByteCounts, way: WeightGradient, bits: int) -> int:
    """Return the bytes of the accumulator beyond the gradient's memory, in whatever form."""
    if way == "accumulate":
        return counts.weight_sum
    return counts.packed_bytes(bits) if way == "packed" else 0


def added_bytes(counts: ByteCounts, way: WeightGradient, bits: int) -> int:
    """Return the bytes of the sum to which each chunk adds its share of dW; 0 if none is wanted."""
    if way == "accumulate":
        return counts.V * counts.class_sum
    return 2 * counts.V * counts.D + counts.packed_bytes(bits) if way == "packed" else 0
