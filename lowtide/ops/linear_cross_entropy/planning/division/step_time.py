"""Predict how many seconds a step takes on an H100 or H200.

Shapes: N tokens, D features, V classes.
"""

from lowtide.core.kernels.backend import is_large_gemm
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts, forms_targets_again
from lowtide.ops.linear_cross_entropy.planning.division import class_blocks, cost_model
from lowtide.ops.linear_cross_entropy.planning.division.cost_model import over_chunks
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling, WeightGradient
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import added_bytes

# Bytes that the small kernels of a chunk move per row and feature. They gather and scale rows of X,
# add them to their targets' classes, and round dX from its float32 product.
ROW_BYTES = 32
SMALL_KERNELS = 12  # launches of small kernels per chunk
CALL = 6e-5  # seconds of the work that a call does once: vectors of rows, the order of targets
ORDER_OF_ROWS = 6e-5  # seconds beside it to order and gather rows, if ignored ones are skipped


def step_seconds(counts: ByteCounts, tiling: Tiling) -> float:
    """Return the predicted seconds of the loss, dX, and dW if it is wanted."""
    chunks = -(-counts.N // tiling.rows)
    small = chunks * SMALL_KERNELS * cost_model.LAUNCH + ROW_BYTES * counts.N * counts.D / cost_model.SPEED
    if tiling.weight_gradient == "class_blocks" and counts.class_blocks is not None:
        return CALL + small + class_blocks.seconds(counts.class_blocks, tiling)
    way, bits, at_once = tiling.weight_gradient, tiling.sum_bits, tiling.product_rows
    large = over_chunks(counts.N, tiling.rows, lambda C: chunk_seconds(counts, C, way, bits, at_once))
    return CALL + small + large + (ORDER_OF_ROWS if counts.skips else 0)


def weight_gradient_seconds(counts: ByteCounts, tiling: Tiling) -> float:
    """Return the predicted seconds of the kernels that form dW, but for class blocks."""
    way, bits = tiling.weight_gradient, tiling.sum_bits
    return over_chunks(counts.N, tiling.rows, lambda C: _chunk_of_dw(counts, C, way, bits))


def chunk_seconds(counts: ByteCounts, rows: int, way: WeightGradient, bits: int, product_rows: int) -> float:
    """Return the predicted seconds of the large kernels of a chunk of `rows` rows."""
    V, D = counts.V, counts.D
    logits = cost_model.exponentials_seconds(rows, V, D, softcap=counts.softcap)
    if counts.skips:
        dx = cost_model.own_product_seconds(rows, D, V)
    else:
        dx = cost_model.product_of_rows_seconds(rows, D, V, most=product_rows)
    return logits + dx + _chunk_of_dw(counts, rows, way, bits)


def _chunk_of_dw(counts: ByteCounts, rows: int, way: WeightGradient, bits: int) -> float:
    V, D, added = counts.V, counts.D, added_bytes(counts, way, bits)
    if not counts.forms_dw:
        return 0.0
    if way == "packed":
        pipelined = counts.pipelined_rows > 0 and is_large_gemm(rows, V, D)
        return cost_model.packed_seconds(V, D, rows, added, pipelined=pipelined)
    if way == "single_product":
        if forms_targets_again(rows, D) and not counts.skips:
            of_targets = cost_model.product_seconds(rows, D, rows, 4 * rows * D)
            return cost_model.product_seconds(V, D, rows, 2 * V * D) + of_targets
        return cost_model.packed_seconds(V, D, rows, V * D, pipelined=is_large_gemm(rows, V, D))
    return cost_model.product_seconds(V, D, rows, 2 * added)


# Seconds of a call of few tokens, by engine (decision 0062): of its small kernels on the card, and
# of the host, for which a small call waits.
FEW_SMALL_KERNELS = {"logits_triton": 2e-5, "exponentials": 13e-5}
HOST = {"logits_triton": 0.6e-3, "exponentials": 0.95e-3}  # of recorded calls, decision 0075
# Seconds of the host for each further time that dW's memory is filled with logits. The host then
# launches one more GEMM and one more softmax.
HOST_OF_CHUNK = 0.07e-3
# Bytes of memory traffic of a softmax per float32 logit. The softmax reads a logit twice, once
# partly from the L2 cache.
SOFTMAX_BYTES = 10
WEIGHT_SPEED = 4e12  # bytes of the weight per second that a GEMM with few rows reads or writes


def few_tokens_seconds(engine: str, counts: ByteCounts, tiling: Tiling, chunks: int) -> float:
    """Return the predicted seconds of a call of few tokens, on card or host, whichever is longer.

    "logits_triton" forms dW by a single GEMM. Before that, it fills dW's memory with logits
    `chunks` times.
    """
    N, V, D, host = counts.N, counts.V, counts.D, HOST[engine]
    if tiling.weight_gradient == "class_blocks":
        return max(step_seconds(counts, tiling), host)
    if engine == "exponentials":
        card = chunk_seconds(counts, N, tiling.weight_gradient, tiling.sum_bits, tiling.product_rows)
    else:
        rows = -(-N // chunks)
        card = chunks * cost_model.product_seconds(rows, V, D, 4 * rows * V)
        card += cost_model.product_of_rows_seconds(N, D, V, most=tiling.product_rows)
        card += cost_model.product_seconds(V, D, N, 2 * V * D)
        card += cost_model.traffic_seconds(SOFTMAX_BYTES * N * V)
        host += (chunks - 1) * HOST_OF_CHUNK
    reads_and_writes = 3 * 2 * V * D / WEIGHT_SPEED  # the weight twice, and its gradient
    return max(max(card, reads_and_writes) + FEW_SMALL_KERNELS[engine], host)
