"""How a workspace is spent: rows of logits, rows of a tile of the pass over them, classes of a copied weight.

Shapes: N rows, D features, V classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.distillation.heads import Heads, Options
from lowtide.linear_cross_entropy.check import ArgumentError
from lowtide.linear_cross_entropy.workspace import DEFAULT_WORKSPACE

# The pass over the logits takes so many bytes of them at a time: what a CPU's cache keeps, what fills a GPU.
TILE_BYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
# Tensors of a tile's size that the pass holds at once.
TEMPORARIES = 8

# The tiles of a product are so many rows high.
ROW_TILE = {"cpu": 8, "cuda": 128}
# Rows of logits begin at multiples of so many numbers: products of unaligned ones are slow.
ALIGNMENT = 16


class Sizes(NamedTuple):
    rows: int
    """Of a chunk."""
    tile_rows: int
    classes: int
    """Whose weight rows are copied at a time; V where no copy is needed."""


def choose_sizes(heads: Heads, options: Options) -> Sizes:
    """The workspace bounds all but inputs, results, and the float32 sum of the weight's gradient."""
    device = "cuda" if heads.device.type == "cuda" else "cpu"
    N, V, number = heads.rows, heads.classes, options.sum_dtype.itemsize
    workspace = DEFAULT_WORKSPACE[device] if options.workspace is None else options.workspace
    operands = [
        (heads.student_input, heads.student_weight, operand_dtype(options.student_dtype, device)),
        (heads.teacher_input, heads.teacher_weight, operand_dtype(options.teacher_dtype, device)),
    ]
    features = sum(input.shape[-1] * dtype.itemsize for input, _, dtype in operands)
    row = 2 * padded(V) * number + 2 * features + heads.student_input.shape[-1] * number
    tile_row = TEMPORARIES * V * number
    copy = max(_copied_bytes(weight_VD, dtype, device) for _, weight_VD, dtype in operands)
    least_copy = min(V * copy, max(row, copy))  # not many small products
    biases = sum(each is not None for each in (heads.student_bias, heads.teacher_bias))
    fixed = 6 * N * number + 3 * biases * V * number + (32768 if device == "cuda" else 4096)

    least = fixed + row + tile_row + least_copy
    if workspace < least:
        raise ArgumentError(
            f"workspace must hold one row of {V} logits of both heads, which takes {least} bytes in this "
            f"call, got {workspace} bytes; pass a larger workspace, or None for the default"
        )
    spare = workspace - least
    # A quarter of what is to spare to each, the rest for rows.
    most_tile_rows = max(1, TILE_BYTES[device] // (V * number))
    tile_rows = min(most_tile_rows, max(N, 1), 1 + spare // 4 // tile_row)
    classes = min(V, (least_copy + spare // 4) // copy) if copy else V
    room = workspace - fixed - tile_rows * tile_row - classes * copy
    return Sizes(_even_rows(N, room // row, ROW_TILE[device]), tile_rows, classes)


def padded(V: int) -> int:
    return -(-V // ALIGNMENT) * ALIGNMENT


def operand_dtype(dtype: torch.dtype, device: str) -> torch.dtype:
    """torch has no half-precision product with a float32 result on the CPU."""
    return dtype if device == "cuda" else torch.promote_types(dtype, torch.float32)


def _copied_bytes(weight_VD: Tensor, dtype: torch.dtype, device: str) -> int:
    """A class, where its dtype or strides do not suit the products. (On CUDA another dtype means autocast,
    and a copy of the whole weight like its own: not the workspace's.)"""
    casts = weight_VD.dtype != dtype and device == "cpu"
    return weight_VD.shape[1] * dtype.itemsize if casts or 1 not in weight_VD.stride() else 0


def _even_rows(N: int, most: int, tile: int) -> int:
    """As few chunks as `most` rows allow, of about the same size, in whole tiles."""
    if most >= N:
        return max(N, 1)
    most -= most % tile if most >= tile else 0
    even = -(-N // -(-N // most))
    return min(most, -(-even // tile) * tile)
