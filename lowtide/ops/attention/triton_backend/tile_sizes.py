"""Look up the tile sizes of each Triton kernel, by shared memory, dtype and features.

A large card has at least LARGE bytes of shared memory per thread block. Its sizes were the fastest
of about ten candidates per kernel on an H200 (decision 0019). Sizes for small cards are the largest
that fit.

Shapes: M queries, N keys; K features of queries and keys, E of values. dk and dv are the gradients
of key and value.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from lowtide.core.kernels.backend import cdiv, next_power_of_2
from lowtide.ops.attention.definition.operands import AttentionSizes

# The most bytes of shared memory of a thread block on an H100: 227 KiB. Consumer cards have 99 KiB.
LARGE = 227 << 10


# The most queries, keys and features of a small problem. Its scores are one tile, in forward and in
# backward (launch_small_problems.py).
SMALL_PROBLEM = 64
# The fewest problems that these kernels take. With fewer, a part of the card is idle, however fast
# one program is.
FEWEST_PROBLEMS = 264


def are_many_small(size: AttentionSizes) -> bool:
    """Return True for many problems that are small in forward and in backward, without TF32."""
    B, H, G, *sizes = size
    return H == G and B * H >= FEWEST_PROBLEMS and max(sizes) <= SMALL_PROBLEM


def sums_bias_of_small(bias: Sequence[int], heads: int) -> bool:
    """Return True if the kernel of small problems sums the gradient of a bias of this shape.

    The bias must have more than one row and more than one column. Heads may share it only if
    batches share it too.
    """
    return min(bias[2:]) > 1 and (bias[0] == 1 or bias[1] == heads)


class TileSizes(NamedTuple):
    """Hold the sizes of a kernel's tile, and the kernel's warps and pipeline stages."""

    M: int
    N: int
    K: int
    """The most features of queries and keys in one block."""
    E: int
    """The most features of values in one block."""
    warps: int
    stages: int


class Tile(NamedTuple):
    """Hold a kernel's tile sizes for one call, and the number of blocks of features."""

    M: int
    N: int
    K: int
    blocks_K: int
    E: int
    blocks_E: int
    cut_K: int
    """0 if all blocks are full; else a divisor of K and of each row's offset (tiles.multiple)."""
    cut_E: int
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """Return the constants of a kernel that loops over blocks of features."""
        return self.constants_of_one_block | {"BLOCKS_K": self.blocks_K, "BLOCKS_E": self.blocks_E}

    @property
    def constants_of_one_block(self) -> dict[str, int]:
        """Return the constants of a kernel whose tiles hold all features."""
        return {
            "BLOCK_M": self.M, "BLOCK_N": self.N, "BLOCK_K": self.K, "BLOCK_E": self.E, "CUT_K": self.cut_K,
            "CUT_E": self.cut_E,
        }  # fmt: skip

    @property
    def options(self) -> dict[str, int]:
        """Return the launch options of the kernel: its warps and pipeline stages."""
        return {"num_warps": self.warps, "num_stages": self.stages}


# The fewest features of a tile: rows of 128 bytes in half precision. If a kernel has a tile at
# least so wide and a narrower one, ptxas 12.8.93 (Triton 3.6) computes a wrong descriptor of shared
# memory. Such a kernel crashes or returns wrong numbers.
MIN_FEATURES = 64  # decision 0020
# Kernels whose tiles may be FEWEST_FEATURES wide if no operand has more features. In all their
# tiles in shared memory, features are the contiguous dimension. So all these tiles are equally
# wide, and the error above cannot occur. A call is excluded if an operand has a stride of 1 between
# rows, because the width of its tile is then the number of rows.
NARROW = (
    *("forward", "query", "key and value", "problem forward", "problem gradient", "short bias"),
    *("whole problem", "wide problem gradient", "few queries"),
)
FEWEST_FEATURES = 32


# A table has pairs (most features, tile sizes) for each kernel. A call takes the first pair that
# allows max(K, E) features. Kernels of float32 that multiply bfloat16 pieces (bf16_split.py) may
# have sizes for each number of pieces: "NAME of 2 pieces" is looked up before NAME. "query" and the
# kernels of small and short problems do not split their operands. Kernels of half precision may
# have sizes for a bias that differs between queries, whose tiles take registers: "NAME with row
# bias", or before it "NAME with transposed bias" (KernelCall.transposed_bias), is looked up first
# (decisions 0096, 0097). Its tiles may have fewer than 64 rows, so a call with a stride of 1
# between rows does not take them. "key and value" computes dk and dv as long as the sums of both
# fit into registers. With more features, dk and dv have a kernel each, or dk is a product of stored
# gradients of scores. If "query" has no sizes either, all gradients are products of stored weights
# and gradients of scores (launch_backward.py).
Table = dict[str, tuple[tuple[int, TileSizes], ...]]
ANY = 1 << 30
LARGE_HALF: Table = {
    "forward": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(64, 64, 128, 128, 4, 3)),
        (256, TileSizes(128, 64, 256, 256, 8, 2)),
        (512, TileSizes(128, 32, 512, 256, 8, 2)),
        (ANY, TileSizes(64, 64, 128, 128, 8, 1)),
    ),
    "forward with row bias": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(128, 64, 128, 128, 8, 3)),
    ),
    "query": (
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(64, 64, 128, 128, 4, 2)),
        (256, TileSizes(128, 64, 256, 256, 8, 1)),
    ),
    "query with row bias": (
        (32, TileSizes(64, 32, 64, 64, 4, 3)),
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
        (128, TileSizes(128, 64, 128, 128, 8, 3)),
    ),
    "key and value": ((64, TileSizes(64, 64, 64, 64, 4, 3)), (128, TileSizes(64, 128, 128, 128, 8, 3))),
    "key and value with row bias": (
        (32, TileSizes(32, 64, 64, 64, 4, 2)),
        (64, TileSizes(64, 64, 64, 64, 4, 2)),
        (128, TileSizes(32, 64, 128, 128, 4, 2)),
    ),
    "key and value with transposed bias": (
        (32, TileSizes(32, 64, 64, 64, 4, 3)),
        (64, TileSizes(64, 64, 64, 64, 4, 3)),
    ),
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
        (128, TileSizes(64, 64, 128, 128, 4, 1)),
        (256, TileSizes(128, 32, 128, 128, 8, 1)),
        (ANY, TileSizes(128, 32, 64, 128, 8, 1)),
    ),
    "query": ((64, TileSizes(64, 64, 64, 64, 4, 1)), (128, TileSizes(128, 32, 128, 128, 8, 1))),
    "key and value of 2 pieces": (
        (64, TileSizes(64, 64, 64, 64, 4, 1)),
        (128, TileSizes(32, 128, 128, 128, 8, 2)),
    ),
    "query of scores of 2 pieces": (
        (64, TileSizes(64, 64, 64, 64, 4, 2)),
        (ANY, TileSizes(64, 32, 128, 128, 4, 3)),
    ),
    "key and value of 3 pieces": ((64, TileSizes(32, 64, 64, 64, 4, 2)),),
    "value of 3 pieces": ((128, TileSizes(64, 64, 128, 128, 4, 1)),),
    "scores": ((ANY, TileSizes(64, 64, 64, 64, 4, 2)),),
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
    "query": ((128, TileSizes(32, 32, 64, 64, 4, 1)),),
    "key and value": ((64, TileSizes(32, 32, 64, 64, 4, 1)),),
    "value": ((128, TileSizes(32, 32, 64, 64, 4, 1)),),
    "scores": ((ANY, TileSizes(32, 64, 64, 64, 4, 2)),),
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
    transposed: bool = False,
    narrow: bool = True,
    step: int = 1,
) -> Tile | None:
    """Return the tile of a kernel, or None if the kernel cannot take K or E features.

    pieces: the number of pieces of each operand. half: operands have 16 bits. row_bias_bytes: the
    bytes per number of a bias that differs between queries, whose tiles need shared memory; 0
    without such a bias. transposed: the kernel of dk and dv reads KernelCall.transposed_bias.
    narrow: no operand has a stride of 1 between rows. step: a divisor of K, E and the offset of
    each row.
    """
    tables = (LARGE_HALF, LARGE_FLOAT) if shared_memory >= LARGE else (SMALL_HALF, SMALL_FLOAT)
    table, features = tables[0 if half else 1], max(K, E)
    sizes = table.get(f"{kernel} of {pieces} pieces") or table.get(kernel, ())
    if row_bias_bytes and narrow:
        sizes = *table.get(f"{kernel} with row bias", ()), *sizes
        if transposed:
            sizes = *table.get(f"{kernel} with transposed bias", ()), *sizes
    size = next((size for most, size in sizes if features <= most), None)
    if size is None:
        return None
    if row_bias_bytes:
        size = _with_row_bias(kernel, pieces, size, features, row_bias_bytes, transposed)
    narrow = narrow and features <= FEWEST_FEATURES and kernel in NARROW
    least = FEWEST_FEATURES if narrow else MIN_FEATURES
    block_k = max(least, min(next_power_of_2(K), size.K))
    block_e = max(least, min(next_power_of_2(E), size.E))
    blocks = block_k, cdiv(K, block_k), block_e, cdiv(E, block_e)
    cuts = step * (K % block_k > 0), step * (E % block_e > 0)
    return Tile(size.M, size.N, *blocks, *cuts, size.warps, size.stages)


def _with_row_bias(
    kernel: str, pieces: int, size: TileSizes, features: int, bytes: int, transposed: bool
) -> TileSizes:
    """Return sizes that leave shared memory for tiles of a bias with `bytes` bytes per number."""
    if bytes > 4:  # float64: a tile takes about as much as one or two stages of keys and values
        return size._replace(stages=1)
    if kernel == "forward" and pieces == 3 and size.N > 32:
        size = size._replace(N=32, stages=size.stages + 1)
        # Above 64 features 128 queries are quicker beside 32 keys, 64 beside 64 (decision 0101).
        return size._replace(M=128, warps=8) if features > 64 else size
    if kernel == "forward" and pieces == 3 and features > 128:  # two blocks of the query's features
        return size._replace(K=min(size.K, 64))
    if pieces > 1:
        return size
    if kernel == "key and value":
        return size if transposed else size._replace(stages=min(size.stages, 2))
    if kernel == "value":
        return size._replace(M=32, stages=1)
    if kernel == "forward" and features > 256:
        return size._replace(stages=1)
    return size


@cache
def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory that a thread block may have on this device.

    Triton's interpreter has no limit; it takes the sizes for large cards.
    """
    if device.type != "cuda":
        return LARGE
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin
