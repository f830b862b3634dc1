"""Look up the tile sizes of each Triton kernel by shared memory, operand width and features.

Sizes for large cards were the fastest of some ten candidates each on an H200 (decision 0019). Sizes
for small cards are the largest that fit.

Shapes: M queries, N keys; K features of queries and keys, E of values.
"""

from functools import cache
from typing import Any, NamedTuple

import torch

# Bytes of shared memory that a block may have on an H100: 227 KiB. Consumer cards have 99 KiB.
LARGE = 227 << 10


class Blocks(NamedTuple):
    """Hold a kernel's tile: queries, keys, features, warps and pipeline stages."""

    M: int
    N: int
    K: int
    """Features of queries and keys at a time, at most."""
    E: int
    """Features of values at a time, at most."""
    warps: int
    stages: int


# The fewest features of a tile: rows of 128 bytes. The ptxas 12.8.93 of Triton 3.6 gets the
# descriptors of narrower tiles wrong where two widths share an address. The result is a crash, or
# numbers other than those that were asked for.
FEWEST = 64  # decision 0020


# For each kernel: the most features (the larger of K and E) that a size is for, and the size. In
# float32, all products but those of "query" are of pieces (bf16_split.py). The gradients of key and
# value share a kernel as long as both fit into its registers. Beyond, each has its own kernel, or
# the key's is a product of stored gradients of scores.
Table = dict[str, tuple[tuple[int, Blocks], ...]]
ANY = 1 << 30
LARGE_HALF: Table = {
    "forward": (
        (64, Blocks(64, 64, 64, 64, 4, 3)),
        (128, Blocks(128, 64, 128, 128, 8, 3)),
        (256, Blocks(128, 64, 256, 256, 8, 2)),
        (512, Blocks(128, 32, 512, 256, 8, 2)),
        (ANY, Blocks(64, 64, 128, 128, 8, 1)),
    ),
    "query": (
        (64, Blocks(64, 64, 64, 64, 4, 3)),
        (128, Blocks(128, 64, 128, 128, 8, 3)),
        (256, Blocks(128, 64, 256, 256, 8, 1)),
    ),
    "key and value": ((64, Blocks(64, 64, 64, 64, 4, 3)), (128, Blocks(64, 128, 128, 128, 8, 3))),
    "key": ((256, Blocks(32, 128, 256, 256, 8, 2)),),
    "value": ((256, Blocks(64, 128, 256, 256, 8, 2)),),
    "scores": ((ANY, Blocks(128, 128, 64, 64, 8, 4)),),
    "query of scores": ((64, Blocks(128, 64, 64, 64, 4, 4)), (ANY, Blocks(128, 64, 256, 256, 8, 4))),
    "key and value of scores": ((ANY, Blocks(128, 128, 128, 128, 8, 3)),),
    "bias of scores": ((ANY, Blocks(64, 32, 64, 64, 4, 3)),),
}
LARGE_FLOAT: Table = {
    "forward of 2 pieces": (
        (64, Blocks(128, 32, 64, 64, 8, 4)),
        (128, Blocks(128, 64, 128, 128, 8, 2)),
        (256, Blocks(128, 32, 256, 256, 8, 1)),
        (ANY, Blocks(128, 32, 128, 128, 8, 1)),
    ),
    "forward of 3 pieces": (
        (64, Blocks(128, 64, 64, 64, 8, 3)),
        (128, Blocks(128, 64, 128, 128, 8, 1)),
        (256, Blocks(128, 32, 128, 128, 8, 1)),
        (ANY, Blocks(128, 32, 64, 128, 8, 1)),
    ),
    "query": (
        (64, Blocks(64, 64, 64, 64, 4, 1)),
        (128, Blocks(128, 32, 128, 128, 8, 1)),
        (ANY, Blocks(64, 32, 64, 64, 4, 1)),
    ),
    "key and value of 2 pieces": ((64, Blocks(64, 64, 64, 64, 4, 1)), (128, Blocks(32, 128, 128, 128, 8, 2))),
    "value of 2 pieces": ((ANY, Blocks(32, 64, 64, 64, 4, 1)),),
    "query of scores of 2 pieces": (
        (64, Blocks(64, 64, 64, 64, 4, 2)),
        (ANY, Blocks(64, 32, 128, 128, 4, 3)),
    ),
    "key and value of scores of 2 pieces": ((ANY, Blocks(32, 64, 128, 128, 4, 3)),),
    "key and value of 3 pieces": ((64, Blocks(32, 64, 64, 64, 4, 2)),),
    "value of 3 pieces": ((128, Blocks(64, 64, 128, 128, 4, 1)), (ANY, Blocks(32, 64, 64, 64, 4, 1))),
    "query of scores of 3 pieces": (
        (64, Blocks(64, 64, 64, 64, 4, 3)),
        (ANY, Blocks(64, 32, 128, 128, 4, 3)),
    ),
    "key and value of scores of 3 pieces": ((ANY, Blocks(32, 64, 128, 128, 4, 3)),),
    "bias of scores": ((ANY, Blocks(64, 32, 64, 64, 4, 3)),),
}
SMALL_HALF: Table = {
    "forward": (
        (64, Blocks(64, 64, 64, 64, 4, 3)),
        (128, Blocks(64, 64, 128, 128, 4, 2)),
        (ANY, Blocks(64, 32, 128, 256, 8, 1)),
    ),
    "query": (
        (64, Blocks(64, 64, 64, 64, 4, 2)),
        (128, Blocks(64, 32, 128, 128, 4, 2)),
        (256, Blocks(64, 32, 128, 128, 8, 1)),
    ),
    "key and value": ((64, Blocks(32, 64, 64, 64, 4, 2)), (128, Blocks(32, 64, 128, 128, 8, 1))),
    "key": ((256, Blocks(32, 64, 64, 128, 8, 1)),),
    "value": ((256, Blocks(32, 64, 128, 128, 8, 1)),),
    "scores": ((ANY, Blocks(64, 64, 64, 64, 4, 3)),),
    "query of scores": ((ANY, Blocks(64, 64, 128, 128, 4, 3)),),
    "key and value of scores": ((ANY, Blocks(64, 64, 128, 128, 4, 3)),),
    "bias of scores": ((ANY, Blocks(64, 32, 64, 64, 4, 3)),),
}
SMALL_FLOAT: Table = {
    "forward of 2 pieces": (
        (64, Blocks(64, 32, 64, 64, 4, 2)),
        (128, Blocks(64, 32, 128, 128, 8, 2)),
        (ANY, Blocks(64, 32, 64, 128, 8, 1)),
    ),
    "forward of 3 pieces": ((64, Blocks(64, 32, 64, 64, 4, 2)), (ANY, Blocks(64, 32, 64, 128, 8, 1))),
    "query": ((ANY, Blocks(32, 32, 64, 64, 4, 1)),),
    "key and value of 2 pieces": ((64, Blocks(32, 32, 64, 64, 4, 1)),),
    "value of 2 pieces": ((ANY, Blocks(32, 32, 64, 64, 4, 1)),),
    "query of scores of 2 pieces": ((ANY, Blocks(64, 32, 64, 64, 4, 1)),),
    "key and value of scores of 2 pieces": ((ANY, Blocks(32, 64, 64, 64, 4, 1)),),
    "key and value of 3 pieces": ((64, Blocks(32, 32, 64, 64, 4, 1)),),
    "value of 3 pieces": ((ANY, Blocks(32, 32, 64, 64, 4, 1)),),
    "query of scores of 3 pieces": ((ANY, Blocks(64, 32, 64, 64, 4, 1)),),
    "key and value of scores of 3 pieces": ((ANY, Blocks(32, 64, 64, 64, 4, 1)),),
    "bias of scores": ((ANY, Blocks(64, 32, 64, 64, 4, 3)),),
}


def blocks(
    kernel: str, half: bool, features: int, shared_memory: int, row_bias: bool = False
) -> Blocks | None:
    """Return the tile of a kernel, or None if it is not for so many features.

    "half" means 16-bit operands. "row_bias" means a bias that differs between queries, whose own
    tiles need room.
    """
    tables = (LARGE_HALF, LARGE_FLOAT) if shared_memory >= LARGE else (SMALL_HALF, SMALL_FLOAT)
    table = tables[0 if half else 1][kernel]
    found = next((size for most, size in table if features <= most), None)
    if found is not None and row_bias:
        if kernel == "forward of 3 pieces" and found.N > 32:
            found = found._replace(N=32, stages=found.stages + 1)
        elif kernel == "key and value":
            found = found._replace(stages=min(found.stages, 2))
        elif kernel == "value":
            found = found._replace(M=32, stages=1)
        elif kernel == "forward" and features > 256:
            found = found._replace(stages=1)
    return found


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have on this device.

    The interpreter has no limit; it gets those of a large card.
    """
    if device.type != "cuda":
        return LARGE
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def cdiv(total: int, step: int) -> int:
    """Return total / step, rounded up; Triton's own function takes 2 us (decision 0023)."""
    return -(-total // step)


def next_power_of_2(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def cut(K: int, E: int, size: Blocks) -> dict[str, Any]:
    """Return a kernel's arguments for this tile."""
    block_k = max(FEWEST, min(next_power_of_2(K), size.K))
    block_e = max(FEWEST, min(next_power_of_2(E), size.E))
    return {
        "BLOCK_M": size.M, "BLOCK_N": size.N, "BLOCK_K": block_k, "BLOCKS_K": cdiv(K, block_k),
        "BLOCK_E": block_e, "BLOCKS_E": cdiv(E, block_e), "CUT_K": K % block_k > 0,
        "CUT_E": E % block_e > 0, "num_warps": size.warps, "num_stages": size.stages,
    }  # fmt: skip
