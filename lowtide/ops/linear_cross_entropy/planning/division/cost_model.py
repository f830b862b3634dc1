"""Predict how many seconds the kernels of a step take on an H100 or H200.

The time of a GEMM is counted in waves. Each multiprocessor computes one tile of the result at a
time; the tiles of all multiprocessors are a wave. The last wave takes as long as a full one, even
if it has few tiles. The exponentials kernel has one tile size. cuBLAS chooses the best of several,
and may divide the inner dimension among multiprocessors. To the time of the waves are added the
start of each kernel, the epilogue of each tile of exponentials, and the part of a sum's traffic
that does not overlap the GEMM. The constants are fitted to 1,144 kernels on an H200 (decision
0064). The prediction for one kernel has a standard deviation of 4 to 8 %.
"""

import functools
from collections.abc import Callable

MULTIPROCESSORS = 132
# Seconds that a wave of 128 x 256 tiles takes per element of the inner dimension: 0.73 PFLOP/s
# (decision 0035).
SECONDS = 11.9e-9
TILES = ((128, 256), (256, 128), (192, 192), (128, 192), (128, 128))
OWN = (128, 256)  # the tile of our own kernels: exponentials, a packed sum, and dX with ignored rows
# The GEMM of dX with ignored rows has tiles of at most this size. It divides the inner dimension of
# the tiles that do not fill a wave into parts. A program of one tile has at least so many classes.
DX_TILE, FEWEST_CLASSES_OF_PART = OWN, 1024  # decisions 0079 and 0087
START = 9e-6  # seconds of a GEMM beside its waves
EPILOGUE = 2.1e-6  # seconds of a tile of exponentials beside its product
SOFTCAP = 6.5e-6  # seconds of a tile's soft cap beside its epilogue (decision 0079)
# The kernels of exponentials and of dX with ignored rows took so many times as long if rows of X
# and W did not begin at cache lines, of CACHE_LINE bytes (measured with 3000 features).
CACHE_LINE, UNALIGNED, UNALIGNED_DX = 128, 1.2, 1.5
# Bytes per second. SUM_SPEED is for the result or sum that a GEMM in cuBLAS or in the Gluon
# pipeline reads and writes. TRITON_SPEED is for the sum of a Triton GEMM, whose traffic does not
# overlap the GEMM. SPEED is for a kernel that only reads and writes.
SUM_SPEED, TRITON_SPEED, SPEED = 6.5e12, 2.5e12, 3e12
# Bytes per second of a GEMM that waits for the memory of its operands and its result, as one of few
# rows does.
GEMM_SPEED = 3.5e12  # decision 0085
LAUNCH = 4e-6  # least seconds of a small kernel


def dx_tile(D: int) -> tuple[int, int]:
    """Return rows and features of a tile of dX with ignored rows."""
    rows, most = DX_TILE
    return rows, next((width for width in (32, 64, 128) if D <= width <= most), most)


def most_parts(rows: int, D: int, V: int, programs: int = MULTIPROCESSORS) -> int:
    """Return the most parts of tiles of dX that a chunk holds; 0 if no tile is divided."""
    if V < 2 * FEWEST_CLASSES_OF_PART:
        return 0
    height, width = dx_tile(D)
    return programs + min(programs, -(-rows // height) * -(-D // width))


def parts_bytes(D: int, V: int) -> tuple[int, int]:
    """Return the bytes of one part for every multiprocessor, and of further parts per row of dX.

    A chunk holds the first plus the second times its rows, or twice the first if that is less.
    """
    height, width = dx_tile(D)
    return bool(D) * most_parts(0, D, V) * height * width * 4, -(-D // width) * width * 4


def exponentials_seconds(rows: int, classes: int, features: int, *, softcap: bool) -> float:
    """Return the seconds of the kernel that computes exponentials."""
    of_tile = features * SECONDS + EPILOGUE + (SOFTCAP if softcap else 0)
    seconds = _waves(rows, classes, OWN) * of_tile
    bytes = 2 * ((rows + classes) * features + rows * classes)
    return START + max(seconds * (1 if _aligned(features) else UNALIGNED), bytes / GEMM_SPEED)


def product_seconds(rows: int, columns: int, summed: int, bytes: int) -> float:
    """Return the seconds of a GEMM with inner dimension `summed`.

    It reads and writes `bytes` bytes of its result, or of the sum to which it adds.
    """
    seconds = _fewest_waves(rows, columns) * summed * SECONDS + bytes / SUM_SPEED
    return START + max(seconds, (_operands(rows, columns, summed) + bytes) / GEMM_SPEED)


def product_of_rows_seconds(rows: int, columns: int, summed: int, *, most: int) -> float:
    """Return the seconds of a GEMM with a float32 result that is computed `most` rows at a time.

    Adding the result to a sum takes as long as writing it.
    """
    return over_chunks(rows, most, lambda size: product_seconds(size, columns, summed, 4 * size * columns))


def over_chunks(N: int, rows: int, seconds: Callable[[int], float]) -> float:
    """Return the sum over the chunks of N tokens, of which `seconds` takes the number of rows."""
    whole, rest = divmod(N, rows)
    return (whole * seconds(rows) if whole else 0) + (seconds(rest) if rest else 0)


def own_product_seconds(rows: int, columns: int, summed: int) -> float:
    """Return the seconds of the kernels that form dX with ignored rows (input_gradient.py).

    `columns` is the number of features. They divide the inner dimension of the tiles that do not
    fill a wave, as `_division` does there.
    """
    waves, rest = divmod(-(-rows // OWN[0]) * -(-columns // OWN[1]), MULTIPROCESSORS)
    longest, traffic, fewest = float(summed if rest else 0), 0.0, FEWEST_CLASSES_OF_PART
    if rest and (own := min(MULTIPROCESSORS // rest, summed // fewest)):
        shortest, parts = summed / own, own * rest
        left = MULTIPROCESSORS - parts
        if own == MULTIPROCESSORS // rest and left:
            tails = -(-rest // left)
            with_tails = summed * tails / (own * tails + 1) + (tails + 1) * fewest / 2
            if with_tails < shortest:
                shortest, parts = with_tails, parts + rest
        if shortest + 2 * fewest < summed:
            longest, traffic = shortest, 2 * START + 8 * parts * OWN[0] * OWN[1] / SUM_SPEED
    seconds = (waves * summed + longest) * SECONDS * (1 if _aligned(columns) else UNALIGNED_DX)
    return START + max(seconds, _operands(rows, columns, summed) / GEMM_SPEED) + traffic


def packed_seconds(classes: int, features: int, rows: int, bytes: int, *, pipelined: bool) -> float:
    """Return the seconds of a GEMM whose result is added to a packed sum of so many bytes."""
    seconds = _waves(classes, features, OWN) * rows * SECONDS
    seconds += 2 * bytes / (SUM_SPEED if pipelined else TRITON_SPEED)
    return START + max(seconds, (_operands(classes, features, rows) + 2 * bytes) / GEMM_SPEED)


def traffic_seconds(bytes: int) -> float:
    """Return the seconds of a kernel that reads and writes so many bytes."""
    return LAUNCH + bytes / SPEED


def three_gemms_seconds(tokens: int, features: int, classes: int, *, chunk: int = 4096) -> float:
    """Return the seconds of the floor: logits, dX and dW, with half-precision results."""
    whole, rest = divmod(tokens, chunk)
    return sum(
        times * product_seconds(*sizes, 2 * sizes[0] * sizes[1])
        for times, rows in ((whole, chunk), (1, rest))
        if times * rows
        for sizes in ((rows, classes, features), (rows, features, classes), (classes, features, rows))
    )


def _operands(rows: int, columns: int, summed: int) -> int:
    """Return the bytes of a GEMM's operands in half precision."""
    return 2 * (rows + columns) * summed


def _aligned(features: int) -> bool:
    return 2 * features % CACHE_LINE == 0


@functools.lru_cache(maxsize=1 << 14)
def _fewest_waves(rows: int, columns: int) -> float:
    """Return the waves of a GEMM with the tile that takes the least time.

    They are counted in waves of 128 x 256 tiles. If the result has fewer tiles than there are
    multiprocessors, several multiprocessors divide the inner dimension of a tile among them.
    """

    def of(tile: tuple[int, int]) -> float:
        tiles = -(-rows // tile[0]) * -(-columns // tile[1])
        return _waves(rows, columns, tile) / max(1, MULTIPROCESSORS // tiles)

    return min(map(of, TILES))


def _waves(rows: int, columns: int, tile: tuple[int, int]) -> float:
    """Return the waves of a GEMM with this tile, counted in waves of 128 x 256 tiles."""
    tiles = -(-rows // tile[0]) * -(-columns // tile[1])
    return -(-tiles // MULTIPROCESSORS) * tile[0] * tile[1] / (OWN[0] * OWN[1])
