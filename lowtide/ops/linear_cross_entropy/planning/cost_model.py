"""Predict how many seconds the GEMMs of a step take on an H100 or H200.

The time is counted in waves. Each multiprocessor computes one tile of a result at a time, and the
last wave takes as long as a full one. The exponentials kernel has one tile size; cuBLAS chooses the
best of several. On an H200 the measured time of E W, summed over 128k and 256k classes, was within
3 % of the prediction for 896 to 2816 rows. The exception was 1024 rows of 2304 features, which were
a sixth faster.
"""

from lowtide.core.backend import PRODUCT_ROWS

MULTIPROCESSORS = 132
# Seconds of a tile of 128 x 256 per step of its inner dimension: 0.73 PFLOP/s (decision 0035).
SECONDS = 11.9e-9
TILES = ((128, 256), (256, 128), (192, 192), (128, 192), (128, 128))
OWN = (128, 256)  # tile of the exponentials
MULTIPLIED = OWN[0] * OWN[1] * MULTIPROCESSORS  # by all multiprocessors in SECONDS
# Speed of reading and writing a sum that a GEMM adds to, if little of that overlaps the GEMM. On
# the Gluon pipeline most of it does; four times this speed made shape A faster by 1.4 % and D
# slower by 3 % (decision 0035).
BYTES_A_SECOND = 4e12
# Seconds of a chunk's small kernels, whose time does not depend on its size.
LAUNCHES = 15e-6


def exponentials_seconds(rows: int, classes: int, features: int) -> float:
    """Return the seconds of the kernel that computes exponentials."""
    return _waves(rows, classes, OWN) * features


def product_seconds(rows: int, columns: int, summed: int) -> float:
    """Return the seconds of a GEMM with the inner dimension `summed`."""
    return min(_waves(rows, columns, tile) for tile in TILES) * summed


def product_of_rows_seconds(rows: int, columns: int, summed: int, *, most: int = PRODUCT_ROWS) -> float:
    """Return the seconds of a GEMM that is computed `most` rows at a time."""
    whole, rest = divmod(rows, most)
    return whole * product_seconds(most, columns, summed) + product_seconds(rest, columns, summed)


def addition_seconds(bytes: int) -> float:
    """Return the seconds of adding to a sum of `bytes` bytes."""
    return 2 * bytes / BYTES_A_SECOND + LAUNCHES


def _waves(rows: int, columns: int, tile: tuple[int, int]) -> float:
    """Return the seconds of a GEMM per step of its inner dimension."""
    tiles = -(-rows // tile[0]) * -(-columns // tile[1])
    return -(-tiles // MULTIPROCESSORS) * tile[0] * tile[1] / (OWN[0] * OWN[1]) * SECONDS


# Seconds of a whole call of few tokens, which one engine or another may run. Both leave dX and dW to
# cuBLAS. For each engine: what its small kernels take of the card, and all of it of the host, whose
# time a small call waits for. Logits beyond dW's memory take a GEMM and a softmax more, of the host
# (decision 0062).
SMALL_KERNELS = {"logits_triton": 5e-5, "exponentials": 13e-5}
HOST = {"logits_triton": 0.8e-3, "exponentials": 1.5e-3}
HOST_OF_CHUNK = 0.25e-3
# Bytes that a softmax reads and writes for each float32 logit: one read of two is from the L2 cache.
SOFTMAX_BYTES = 10


def few_tokens_seconds(engine: str, tokens: int, features: int, classes: int, *, chunks: int = 1) -> float:
    """Return the seconds of a step by "exponentials", or by "logits_triton" with a single GEMM for dW.

    `chunks` is how often the latter fills dW's memory with logits.
    """
    weight, logits = 2 * classes * features, 2 * tokens * classes
    own = _or_bytes(exponentials_seconds(tokens, classes, features), weight + logits)
    others = _or_bytes(2 * tokens * features * classes * SECONDS / MULTIPLIED, 2 * (weight + logits))
    device, host = own + others + SMALL_KERNELS[engine], HOST[engine]
    if engine == "logits_triton":
        device += SOFTMAX_BYTES * tokens * classes / BYTES_A_SECOND
        host += (chunks - 1) * HOST_OF_CHUNK
    return max(device, host)


def _or_bytes(seconds: float, bytes: int) -> float:
    """Return the seconds of a GEMM that reads and writes so many bytes, if that takes longer."""
    return max(seconds, bytes / BYTES_A_SECOND)
