"""Hold what GEMM kernels in Triton and in Gluon share: order and halves of tiles, descriptors.

Shapes: C rows and B columns of a tile.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# The rows, classes and features of a tile of logits. The epilogue runs on one half of the tile's
# classes after the other. This halves its registers. It also leaves room in an H100's shared memory
# for three stages of operands, for the operands of a second term, and for what the epilogue loads.
BLOCK_C, BLOCK_B, BLOCK_D = 128, 256, 64
STAGES, WARPS = 3, 8  # decision 0012
GROUP = 8  # row tiles that read a tile of the weight while it is in the L2 cache

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_at(tile, tiles_c, tiles_b, GROUP: tl.constexpr):
    """Return the row tile and the class tile of tile number `tile`.

    Consecutive numbers run through GROUP row tiles before they go on to the next class tile. So
    GROUP row tiles read each class tile while it is in the L2 cache.
    """
    group_tiles = GROUP * tiles_b
    first_c = tile // group_tiles * GROUP
    height = min(tiles_c - first_c, GROUP)
    return first_c + tile % group_tiles % height, tile % group_tiles // height


@triton.jit
def halves(tile_cb):
    """Return the first and the second half of a tile's columns."""
    C: tl.constexpr = tile_cb.shape[0]
    B: tl.constexpr = tile_cb.shape[1]
    return tl.split(tl.permute(tl.reshape(tile_cb, (C, 2, B // 2)), (0, 2, 1)))


@functools.cache  # torch takes 5 microseconds for the query
def multiprocessors(device: torch.device) -> int:
    """Return the device's number of multiprocessors, or 2 on the CPU, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor that loads and stores boxes of rows x columns."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def described(term: tuple[Tensor, Tensor]) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return tensor descriptors of a term's input and weight."""
    x_CD, weight_BD = term
    return describe(x_CD, BLOCK_C, BLOCK_D), describe(weight_BD, BLOCK_B, BLOCK_D)
