"""Say how many bytes a call may use: the workspace that was asked for, or else the default.

The default is no more than the dense computation would hold, but leaves room for pieces that are
large enough.
"""

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.division.sizes import choose_sizes
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling

MIB = 1 << 20
DEFAULT_WORKSPACE = {"cpu": 64 * MIB, "cuda": 1024 * MIB}

# The default is at least this much larger than the smallest plan. On CUDA this is the granularity
# of allocations.
LEAST_ROOM = {"cpu": 1 << 16, "cuda": 1 << 17}
# It is at least this much larger if the plan would otherwise take few rows or few classes at a
# time. Such a plan was 10 to 100 times slower on the CPU. With this room a call takes at most 1.5
# times as long as with the whole default.
ROOM, ROWS, CHUNKS, CLASSES = {"cpu": 4 * MIB, "cuda": 16 * MIB}, 32, 64, 128
# With a single GEMM over all tokens, the dense computation may hold nothing but their exponentials
# beside a larger weight gradient. This GEMM takes as many bytes more per token, per feature and per
# class.
BESIDE_ONE_PRODUCT = 256


def workspace_bytes(workspace: int | None, device: str, beside: int = 0) -> int:
    """Return the workspace asked for, or the default plus `beside`, which it does not include."""
    return DEFAULT_WORKSPACE[device] + beside if workspace is None else workspace


def granted_bytes(workspace: int | None, dense: int | None, counts: ByteCounts) -> int:
    """Return the workspace of a call.

    The default does not include what further terms need nor, on CUDA, the float32 sum. It is
    limited to what the dense computation would hold, where that is known, as long as there is room
    for enough rows and classes at a time.
    """
    beside = counts.further_terms + (counts.weight_sum if counts.device == "cuda" else 0)
    most = workspace_bytes(workspace, counts.device, beside)
    if workspace is not None or dense is None or dense >= most:
        return most
    if counts.one_product_row:
        dense += BESIDE_ONE_PRODUCT * (counts.N + counts.D + counts.V) + counts.exchanged
    smallest = counts.smallest_workspace
    limited = min(most, max(dense, smallest + LEAST_ROOM[counts.device]))
    tiling = choose_sizes(limited, counts)
    # Class blocks take one GEMM more, which on a card the same room avoids.
    one_more = counts.device == "cuda" and tiling.weight_gradient == "class_blocks"
    if _has_large_pieces(tiling, counts) and not one_more:
        return limited
    return min(most, max(limited, smallest + ROOM[counts.device]))


def _has_large_pieces(tiling: Tiling, counts: ByteCounts) -> bool:
    """Return True if chunks and blocks are large enough for GEMMs, or as large as the call."""
    rows, classes = min(max(ROWS, counts.N // CHUNKS), counts.N), min(CLASSES, counts.V)
    if tiling.weight_gradient == "class_blocks":
        rows_at_once, classes_at_once = tiling.block_rows, tiling.block_classes
    else:
        rows_at_once, classes_at_once = tiling.rows, tiling.operand_classes
    return tiling.rows >= rows and rows_at_once >= rows and classes_at_once >= classes
