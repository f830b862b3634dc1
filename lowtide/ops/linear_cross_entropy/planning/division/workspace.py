"""Tell how many bytes a call may use: the workspace that was asked for, or else the default.

The default is no more than the dense computation would hold, unless this leaves room for too few
rows or classes at a time. A small call may hold a little more, so that it is one chunk.
"""

from dataclasses import replace

from lowtide.ops.linear_cross_entropy.planning.byte_counts import FEWEST_PRODUCT_ROWS, ByteCounts
from lowtide.ops.linear_cross_entropy.planning.division.sizes import choose_sizes, may_skip
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling

MIB = 1 << 20
DEFAULT_WORKSPACE = {"cpu": 64 * MIB, "cuda": 1024 * MIB}

# The default is at least LEAST_ROOM bytes larger than the smallest workspace that the call runs in.
# On CUDA this is the granularity of allocations.
LEAST_ROOM = {"cpu": 1 << 16, "cuda": 1 << 17}
# The default is at least ROOM bytes larger than the smallest workspace if the plan would otherwise
# take few rows (less than ROWS or N / CHUNKS, whichever is more) or fewer than CLASSES classes at a
# time. Such a plan was 10 to 100 times slower on the CPU. With ROOM a call takes at most 1.5 times
# as long as with the whole default.
ROOM, ROWS, CHUNKS, CLASSES = {"cpu": 4 * MIB, "cuda": 16 * MIB}, 32, 64, 128
# The most bytes by which a call may exceed the dense computation's so that it is one chunk.
OF_ONE_CHUNK = {"cpu": 4 * MIB, "cuda": 64 * MIB}  # decision 0092
# Bytes per token, per feature and per class of the vectors that a call holds.
BESIDE = {"cpu": 128, "cuda": 256}  # decisions 0074 and 0090


def workspace_bytes(workspace: int | None, device: str, beside: int = 0) -> int:
    """Return the workspace that was asked for, or the default plus `beside` bytes."""
    return DEFAULT_WORKSPACE[device] + beside if workspace is None else workspace


def granted_bytes(workspace: int | None, dense: int | None, counts: ByteCounts, *, rows: int = 0) -> int:
    """Return the workspace of a call.

    To the default are added the bytes of further linear terms and, on CUDA, those of the float32
    sum of dW. If the bytes of the dense computation are known, they limit the result, unless this
    leaves room for too few rows or classes at a time.

    The dense computation may hold little beside its gradients: one half-precision tensor of the
    logits' size. A chunk of all tokens holds such a tensor too, and beside it some rows of dX in
    float32, or parts of its tiles, and perhaps a sum of dW. These are granted (decisions 0074, 0084
    and 0092), because several chunks and other ways to form dW take several times as long. They may
    take OF_ONE_CHUNK, BESIDE for each number and, on CUDA, `rows` bytes for rows that the dense
    computation does not hold.
    """
    beside = counts.further_terms + (counts.weight_sum if counts.device == "cuda" else 0)
    most = workspace_bytes(workspace, counts.device, beside)
    if workspace is not None or dense is None or dense >= most:
        return most
    on_cuda = counts.device == "cuda"
    if counts.one_product_row or on_cuda:
        numbers = BESIDE[counts.device] * (counts.N + counts.D + counts.V)
        most_held = dense + OF_ONE_CHUNK[counts.device] + numbers + (rows if on_cuda else 0)
        one_chunk = [counts.with_smaller_products(0).one_chunk_and_sum]
        if may_skip(counts):
            # Parts of dX's tiles may take more than a small product.
            one_chunk.append(counts.of_skipping().one_chunk_and_sum)
        dense = max([dense, *(each for each in one_chunk if each <= most_held)])
    smallest = counts.smallest_workspace
    limited = min(most, max(dense, smallest + LEAST_ROOM[counts.device]))
    tiling = choose_sizes(limited, counts)
    # Class blocks take one more GEMM. On CUDA, ROOM is enough to avoid it.
    one_more = on_cuda and tiling.weight_gradient == "class_blocks"
    if _has_large_pieces(tiling, counts) and not one_more:
        return limited
    return min(most, max(limited, smallest + ROOM[counts.device]))


def with_logits_placed(
    counts: ByteCounts, workspace: int | None, dense: int | None, *, rows: int = 0
) -> ByteCounts:
    """Return the counts with the first place for logits, before a single GEMM, that leaves room.

    One chunk with logits of its own is tried if dW's memory holds those of fewer tokens. Else they
    lie there, with as few rows at a time as the rows of dX beside them require.
    """

    def fits(counts: ByteCounts) -> bool:
        return counts.one_chunk <= granted_bytes(workspace, dense, counts, rows=rows)

    if counts.own_logits_row and fits(own := counts.with_own_logits()):
        return own
    fewer = counts
    while fewer.sum_row and fewer.one_product_row and not fits(fewer):
        most = min(fewer.N, fewer.rows_of_logits)
        if most <= FEWEST_PRODUCT_ROWS:
            return counts
        fewer = replace(fewer, rows_of_logits=most // 2)
    return fewer


def _has_large_pieces(tiling: Tiling, counts: ByteCounts) -> bool:
    """Return True if chunks and blocks are large enough for GEMMs, or as large as the call."""
    rows, classes = min(max(ROWS, counts.N // CHUNKS), counts.N), min(CLASSES, counts.V)
    if tiling.weight_gradient == "class_blocks":
        rows_at_once, classes_at_once = tiling.block_rows, tiling.block_classes
    else:
        rows_at_once, classes_at_once = tiling.rows, tiling.operand_classes
    return tiling.rows >= rows and rows_at_once >= rows and classes_at_once >= classes
