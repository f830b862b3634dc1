"""Predict how many seconds a step takes on an H100 or H200.

Shapes: N tokens, D features, V classes.
"""

from lowtide.core.backend import is_large_gemm
from lowtide.ops.linear_cross_entropy.planning import class_blocks, cost_model
from lowtide.ops.linear_cross_entropy.planning.byte_counts import TARGETS, ByteCounts
from lowtide.ops.linear_cross_entropy.planning.plan import Tiling, WeightGradient
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import added_bytes

# Bytes that the small kernels of a chunk move per row and feature: rows of X gathered, scaled and added
# to their targets' classes, and dX from its float32 product.
ROW_BYTES = 32
SMALL_KERNELS = 12  # of a chunk
CALL = 15e-5  # seconds of what a call does once: vectors, the order of targets


def step_seconds(counts: ByteCounts, tiling: Tiling) -> float:
    """Return the predicted seconds of loss and both gradients with these sizes."""
    chunks = -(-counts.N // tiling.rows)
    small = chunks * SMALL_KERNELS * cost_model.LAUNCH + ROW_BYTES * counts.N * counts.D / cost_model.SPEED
    if tiling.weight_gradient == "class_blocks" and counts.class_blocks is not None:
        return CALL + small + class_blocks.seconds(counts.class_blocks, tiling)
    way, bits, at_once = tiling.weight_gradient, tiling.sum_bits, tiling.product_rows
    whole, rest = divmod(counts.N, tiling.rows)
    large = whole * chunk_seconds(counts, tiling.rows, way, bits, at_once)
    if rest:
        large += chunk_seconds(counts, rest, way, bits, at_once)
    return CALL + small + large


def chunk_seconds(counts: ByteCounts, rows: int, way: WeightGradient, bits: int, product_rows: int) -> float:
    """Return the predicted seconds of the large kernels of a chunk of so many rows."""
    N, V, D, added = counts.N, counts.V, counts.D, added_bytes(counts, way, bits)
    logits = cost_model.exponentials_seconds(rows, V, D)
    dx = cost_model.product_of_rows_seconds(rows, D, V, most=product_rows)
    if way == "packed":
        pipelined = counts.pipelined and is_large_gemm(rows, V, D)
        dw = cost_model.packed_seconds(V, D, rows, added, pipelined=pipelined)
    elif way == "single_product":
        dw = cost_model.product_seconds(V, D, rows, 2 * V * D)
        dw += -(-N // TARGETS) * cost_model.product_seconds(TARGETS, D, N, 4 * TARGETS * D)
    else:
        dw = cost_model.product_seconds(V, D, rows, 2 * added)
    return logits + dx + dw
