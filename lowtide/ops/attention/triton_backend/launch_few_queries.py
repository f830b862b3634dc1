"""Launch the kernels for a few queries with many keys (kernels/few_queries.py).

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; E features of values.
"""

import torch
from torch import Tensor

from lowtide.core.kernels.backend import cdiv, next_power_of_2
from lowtide.ops.attention.triton_backend.kernels.few_queries import few_queries_kernel, merge_parts_kernel
from lowtide.ops.attention.triton_backend.launch import KernelCall

# The fewest keys that these kernels take: fewer are not worth dividing among programs.
FEWEST_KEYS = 1024
# The number of programs that an H200 runs at once. With fewer key heads, counted over all batches,
# the keys of each head are divided into parts. There is one program per part, and at most so many.
PROGRAMS = 264
# The rows of one program of merge_parts_kernel.
ROWS = 8


def is_few(call: KernelCall) -> bool:
    """Return True if the queries that share a key head fit one tile, and these kernels may help.

    They do not help with many key heads of one query head each: there the general kernel also reads
    each key only once.
    """
    size, tile = call.size, call.find_tile("few queries")
    if tile is None or call.pieces > 1 or size.N < FEWEST_KEYS or 0 in size[:5]:
        return False
    few = size.M * size.R <= tile.M and tile.blocks_K == tile.blocks_E == 1
    return few and (size.R > 1 or 2 * size.B * size.G <= PROGRAMS)


def forward(call: KernelCall, out: Tensor, low: Tensor | None, statistics: Tensor | None) -> None:
    """Write the result and, where memory is given, its low half and the statistics of each row."""
    B, H, G, M, N, _, E = call.size
    tile, rows = call.tile("few queries"), B * H * M
    keys = tile.N * cdiv(cdiv(N, tile.N), max(1, PROGRAMS // (B * G)))
    parts = cdiv(N, keys)
    part = part_sums = None
    if parts > 1:  # in all at most PROGRAMS tiles of float32
        part, part_sums = (out.new_empty(parts, rows, each, dtype=torch.float32) for each in (E, 2))
    few_queries_kernel[(parts * B * G,)](
        *call.tensors, out, low, statistics, part, part_sums, *call.strides, out.stride(), *call.sizes,
        parts, keys, *call.scalars, **call.constants, **tile.constants_of_one_block, **tile.options,
    )  # fmt: skip
    if parts > 1:
        merge_parts_kernel[(cdiv(rows, ROWS),)](
            part, part_sums, out, low, statistics, out.stride(), H, M, E, rows, parts,
            call.scalars.rescale, BASE_2=call.constants["BASE_2"], BLOCK_M=ROWS,
            BLOCK_E=max(16, next_power_of_2(E)), num_warps=4, num_stages=1,
        )  # fmt: skip
