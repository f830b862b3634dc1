"""Look up the tile sizes of each Triton kernel by shared memory, operand width and features.

Sizes for large cards were the fastest of some ten candidates each on an H200 (decision 0019). Sizes
for small cards are the largest that fit.

Shapes: M queries, N keys; K features of queries and keys, E of values.
"""

from functools import cache
from typing import NamedTuple

import torch

from lowtide.core.kernels.backend import cdiv, next_power_of_2

# Bytes of shared memory that a block may have on an H100: 227 KiB. Consumer cards have 99 KiB.
LARGE = 227 << 10


class TileSizes(NamedTuple):
    """Hold a kernel's tile: queries, keys, features, warps and pipeline stages."""

    M: int
    N: int
    K: int
    """Features of queries and keys at a time, at most."""
    E: int
    """Features of values at a time, at most."""
    warps: int
    stages: int


class Tile(NamedTuple):
    """Hold a kernel's tile for a call: the sizes, and how features are divided into blocks."""

    M: int
    N: int
    K: int
    blocks_K: int
    E: int
    blocks_E: int
    cut_K: int
    """0 if all blocks are full; else what divides K and where each row begins (tiles.load_tile)."""
    cut_E: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants of a kernel that goes over blocks of features."""
        return self.constants_of_one_block | {"BLOCKS_K": self.blocks_K, "BLOCKS_E": self.blocks_E}

    @property
    def constants_of_one_block(self) -> dict[str, int]:
        """Return the constants of a kernel whose tiles have all features."""
        return {
            "BLOCK_M": self.M, "BLOCK_N": self.N, "BLOCK_K": self.K, "BLOCK_E": self.E, "CUT_K": self.cut_K,
            "CUT_E": self.cut_E,
        }  # fmt: skip

    @property
    def options(self) -> dict[str, int]:
        """Return what Triton compiles the kernel with."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# A tile has at least so many features: rows of 128 bytes. With narrower tiles, the ptxas 12.8.93 of
# Triton 3.6 confuses the descriptors of tiles of two widths at one address. The result is a crash,
# or other numbers than those that were asked for.
MIN_FEATURES = 64  # decision 0020
# Kernels whose tiles in shared memory all have features as rows, if operands have. Where no operand
# has more than 32 features, all of these tiles are 32 wide, so no tile of another width is beside
# them. A tile of an operand whose rows are neighbours in memory is as wide as it has rows.
NARROW = (
    *("forward", "query", "key and value", "problem forward", "problem gradient", "short bias"),
    *("whole problem", "wide problem gradient", "few queries"),
)
FEWEST_FEATURES = 32


# Each kernel has pairs (most features, tile sizes); of a call's features the larger of K and E
# counts, and the first pair that allows as many is taken. In float32 every kernel but "query"
# multiplies pieces (bf16_split.py): "NAME of 2 pieces" is looked up before NAME. One kernel
# computes the gradients of key and value as long as the sums of both fit into its registers. With
# more features each has a kernel of its own, or the key's gradient is a product of stored scores.
Table = dict[str, tuple[tuple[int, TileSizes], ...]]
ANY = 1 << 30
LARGE_HALF: Table = {
    "forward": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(128, 64, 128, 128, 8, 3)),
        (256, TileSizes(128, 64, 256, 256, 8, 2)),
        (512, TileSizes(128, 32, 512, 256, 8, 2)),
        (ANY, TileSizes(64, 64, 128, 128, 8, 1)),
    ),
    "query": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(128, 64, 128, 128, 8, 3)),
        (256, TileSizes(128, 64, 256, 256, 8, 1)),
    ),
    "key and value": ((64, TileSizes(64, 64, 64, 64, 4, 3)), (128, TileSizes(64, 128, 128, 128, 8, 3))),
    "key": ((256, TileSizes(32, 128, 256, 256, 8, 2)),),
    "value": ((256, TileSizes(64, 128, 256, 256, 8, 2)),),
    "scores": ((ANY, TileSizes(128, 128, 64, 64, 8, 4)),),
    "query of scores": ((64, TileSizes(128, 64, 64, 64, 4, 4)), (ANY, TileSizes(128, 64, 256, 256, 8, 4))),
    "key and value of scores": ((ANY, TileSizes(128, 128, 128, 128, 8, 3)),),
    "bias of scores": ((ANY, TileSizes(64, 32, 64, 64, 4, 3)),),
    "few queries": (
        (64, TileSizes(64, 128, 64, 64, 4, 3)),
        (128, TileSizes(64, 64, 128, 128, 4, 3)),
        (256, TileSizes(64, 32, 256, 256, 4, 3)),
    ),
    "problem forward": ((64, TileSizes(64, 64, 64, 64, 4, 1)),),
    "problem gradient": ((32, TileSizes(64, 64, 64, 64, 4, 2)), (64, TileSizes(64, 64, 64, 64, 4, 1))),
    "wide problem gradient": ((64, TileSizes(32, 128, 64, 64, 4, 1)),),
    "short bias": ((64, TileSizes(64, 64, 64, 64, 4, 3)),),
}
LARGE_FLOAT: Table = {
    "forward of 2 pieces": (
        (64, TileSizes(128, 32, 64, 64, 8, 4)),
        (128, TileSizes(128, 64, 128, 128, 8, 2)),
        (256, TileSizes(128, 32, 256, 256, 8, 1)),
        (ANY, TileSizes(128, 32, 128, 128, 8, 1)),
    ),
    "forward of 3 pieces": (
        (32, TileSizes(64, 64, 64, 64, 4, 2)),
        (64, TileSizes(128, 64, 64, 64, 8, 3)),
        (128, TileSizes(128, 64, 128, 128, 8, 1)),
        (256, TileSizes(128, 32, 128, 128, 8, 1)),
        (ANY, TileSizes(128, 32, 64, 128, 8, 1)),
    ),
    "query": (
        (64, TileSizes(64, 64, 64, 64, 4, 1)),
        (128, TileSizes(128, 32, 128, 128, 8, 1)),
        (ANY, TileSizes(64, 32, 64, 64, 4, 1)),
    ),
    "key and value of 2 pieces": (
        (64, TileSizes(64, 64, 64, 64, 4, 1)),
        (128, TileSizes(32, 128, 128, 128, 8, 2)),
    ),
    "value of 2 pieces": ((ANY, TileSizes(32, 64, 64, 64, 4, 1)),),
    "query of scores of 2 pieces": (
        (64, TileSizes(64, 64, 64, 64, 4, 2)),
        (ANY, TileSizes(64, 32, 128, 128, 4, 3)),
    ),
    "key and value of 3 pieces": ((64, TileSizes(32, 64, 64, 64, 4, 2)),),
    "value of 3 pieces": ((128, TileSizes(64, 64, 128, 128, 4, 1)), (ANY, TileSizes(32, 64, 64, 64, 4, 1))),
    "query of scores of 3 pieces": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (ANY, TileSizes(64, 32, 128, 128, 4, 3)),
    ),
    "key and value of scores": ((ANY, TileSizes(32, 64, 128, 128, 4, 3)),),
    "bias of scores": ((ANY, TileSizes(64, 32, 64, 64, 4, 3)),),
    "problem forward": ((64, TileSizes(64, 64, 64, 64, 4, 1)),),
    "problem gradient": ((64, TileSizes(64, 64, 64, 64, 4, 1)),),
    "short bias": ((32, TileSizes(64, 64, 64, 64, 4, 2)),),
    "whole problem": ((32, TileSizes(64, 64, 64, 64, 4, 1)),),
}
SMALL_HALF: Table = {
    "forward": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(64, 64, 128, 128, 4, 2)),
        (ANY, TileSizes(64, 32, 128, 256, 8, 1)),
    ),
    "query": (
        (64, TileSizes(64, 64, 64, 64, 4, 2)),
        (128, TileSizes(64, 32, 128, 128, 4, 2)),
        (256, TileSizes(64, 32, 128, 128, 8, 1)),
    ),
    "key and value": ((64, TileSizes(32, 64, 64, 64, 4, 2)), (128, TileSizes(32, 64, 128, 128, 8, 1))),
    "key": ((256, TileSizes(32, 64, 64, 128, 8, 1)),),
    "value": ((256, TileSizes(32, 64, 128, 128, 8, 1)),),
    "scores": ((ANY, TileSizes(64, 64, 64, 64, 4, 3)),),
    "query of scores": ((ANY, TileSizes(64, 64, 128, 128, 4, 3)),),
    "key and value of scores": ((ANY, TileSizes(64, 64, 128, 128, 4, 3)),),
    "bias of scores": ((ANY, TileSizes(64, 32, 64, 64, 4, 3)),),
    "few queries": ((64, TileSizes(64, 64, 64, 64, 4, 3)), (128, TileSizes(64, 32, 128, 128, 4, 3))),
    "problem forward": ((64, TileSizes(64, 64, 64, 64, 4, 1)),),
    "problem gradient": ((32, TileSizes(64, 64, 64, 64, 4, 1)), (64, TileSizes(64, 64, 64, 64, 4, 1))),
    "wide problem gradient": ((64, TileSizes(32, 128, 64, 64, 8, 1)),),
    "short bias": ((64, TileSizes(64, 64, 64, 64, 4, 2)),),
}
SMALL_FLOAT: Table = {
    "forward of 2 pieces": (
        (64, TileSizes(64, 32, 64, 64, 4, 2)),
        (128, TileSizes(64, 32, 128, 128, 8, 2)),
        (ANY, TileSizes(64, 32, 64, 128, 8, 1)),
    ),
    "forward of 3 pieces": ((64, TileSizes(64, 32, 64, 64, 4, 2)), (ANY, TileSizes(64, 32, 64, 128, 8, 1))),
    "query": ((ANY, TileSizes(32, 32, 64, 64, 4, 1)),),
    "key and value": ((64, TileSizes(32, 32, 64, 64, 4, 1)),),
    "value": ((ANY, TileSizes(32, 32, 64, 64, 4, 1)),),
    "query of scores": ((ANY, TileSizes(64, 32, 64, 64, 4, 1)),),
    "key and value of scores": ((ANY, TileSizes(32, 64, 64, 64, 4, 1)),),
    "bias of scores": ((ANY, TileSizes(64, 32, 64, 64, 4, 3)),),
    "problem forward": ((64, TileSizes(64, 64, 64, 64, 4, 1)),),
    "problem gradient": ((64, TileSizes(64, 64, 64, 64, 4, 1)),),
    "short bias": ((32, TileSizes(64, 64, 64, 64, 4, 1)),),
    "whole problem": ((32, TileSizes(64, 64, 64, 64, 4, 1)),),
}


@cache
def find_tile(
    kernel: str,
    pieces: int,
    half: bool,
    K: int,
    E: int,
    shared_memory: int,
    row_bias_bytes: int = 0,
    *,
    narrow: bool = True,
    step: int = 1,
) -> Tile | None:
    """Return the tile of a kernel, or None if it has no tile for so many features.

    pieces: of each operand. half: operands have 16 bits. row_bias_bytes: of one number of a bias
    that differs between queries, whose tiles need room; 0 without such a bias. narrow: of no
    operand are the rows neighbours in memory. step: what divides K, E and where each row begins.
    """
    tables = (LARGE_HALF, LARGE_FLOAT) if shared_memory >= LARGE else (SMALL_HALF, SMALL_FLOAT)
    table, features = tables[0 if half else 1], max(K, E)
    name = f"{kernel} of {pieces} pieces"
    sizes = table.get(name) or table.get(kernel, ())
    size = next((size for most, size in sizes if features <= most), None)
    if size is None:
        return None
    if row_bias_bytes:
        size = _with_row_bias(kernel, pieces, size, features, row_bias_bytes)
    narrow = narrow and features <= FEWEST_FEATURES and kernel in NARROW
    least = FEWEST_FEATURES if narrow else MIN_FEATURES
    block_k = max(least, min(next_power_of_2(K), size.K))
    block_e = max(least, min(next_power_of_2(E), size.E))
    blocks = block_k, cdiv(K, block_k), block_e, cdiv(E, block_e)
    cuts = step * (K % block_k > 0), step * (E % block_e > 0)
    return Tile(size.M, size.N, *blocks, *cuts, size.warps, size.stages)


def _with_row_bias(kernel: str, pieces: int, size: TileSizes, features: int, bytes: int) -> TileSizes:
    """Return a size that leaves room for the tiles of a bias, of so many bytes a number."""
    if bytes > 4:  # float64: a tile of it takes as much as those of 128 keys and values
        return size._replace(stages=1)
    if kernel == "forward" and pieces == 3 and size.N > 32:
        return size._replace(N=32, stages=size.stages + 1)
    if pieces > 1:
        return size
    if kernel == "key and value":
        return size._replace(stages=min(size.stages, 2))
    if kernel == "value":
        return size._replace(M=32, stages=1)
    if kernel == "forward" and features > 256:
        return size._replace(stages=1)
    return size


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have on this device.

    The interpreter has no limit; it gets those of a large card.
    """
    if device.type != "cuda":
        return LARGE
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
