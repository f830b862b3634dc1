from lowtide.core.matmul import PRODUCT_ROWS

"""How long the products of a step take on an H100 or H200, predicted; in seconds.

It is a matter of waves: of the tiles of a result each multiprocessor takes one at a time, and the last wave
is as long as a full one. Exponentials leave in tiles of one size; for its own products cuBLAS takes the size
of tile that suits best. (On an H200 E W, summed over 128k and 256k classes, took what this says to within 3 %
for 896 to 2816 rows, but for 1024 rows of 2304 features, which were a sixth quicker.)
"""

MULTIPROCESSORS = 132
# Of a tile of 128 x 256, for each number that its results are summed over: 0.73 PFLOP/s (decision 0035).
SECONDS = 11.9e-9
TILES = ((128, 256), (256, 128), (192, 192), (128, 192), (128, 128))
OWN = (128, 256)  # of the exponentials
# A sum that is read and written while it is added to, where little of that hides behind the product. On the
# pipeline most of it does; four times this speed made A quicker by 1.4 % and D slower by 3 (decision 0035).
BYTES_A_SECOND = 4e12
# Of the kernels beside a chunk's products that take no time by their size.
LAUNCHES = 15e-6


def exponentials(rows: int, classes: int, features: int) -> float:
    return _waves(rows, classes, OWN) * features


def product(rows: int, columns: int, summed: int) -> float:
    return min(_waves(rows, columns, tile) for tile in TILES) * summed


def product_of_rows(rows: int, columns: int, summed: int, *, most: int = PRODUCT_ROWS) -> float:
    """`most` at a time."""
    whole, rest = divmod(rows, most)
    return whole * product(most, columns, summed) + product(rest, columns, summed)


def addition(bytes: int) -> float:
    """To a sum that is so large."""
    return 2 * bytes / BYTES_A_SECOND + LAUNCHES


def _waves(rows: int, columns: int, tile: tuple[int, int]) -> float:
    """In seconds, for each number that is summed over."""
    tiles = -(-rows // tile[0]) * -(-columns // tile[1])
    return -(-tiles // MULTIPROCESSORS) * tile[0] * tile[1] / (OWN[0] * OWN[1]) * SECONDS
