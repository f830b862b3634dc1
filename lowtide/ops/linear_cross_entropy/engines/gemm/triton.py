"""Hold what the GEMM kernels in Triton and in Gluon share: order of tiles, halves, descriptors.

Shapes: C rows and B columns of a tile.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# A tile of the logits. Its epilogue runs on one half after the other. That takes half the
# registers, and leaves room in an H100's shared memory for three stages of operands, for those of a
# second term, and for what the epilogue loads.
BLOCK_C, BLOCK_B, BLOCK_D = 128, 256, 64
STAGES, WARPS = 3, 8  # decision 0012
GROUP = 8  # row tiles that share a column of weight tiles while that is in the L2 cache

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def tile_at(tile, tiles_c, tiles_b, GROUP: tl.constexpr):
    """Return the row tile and the class tile of tile number `tile`.

    Numbers run through GROUP row tiles before the next class tile, so that these share each class
    tile in the L2 cache.
    """
    group_tiles = GROUP * tiles_b
    first_c = tile // group_tiles * GROUP
    height = min(tiles_c - first_c, GROUP)
    return first_c + tile % group_tiles % height, tile % group_tiles // height


@triton.jit
def halves(tile_cb):
    """Return the two halves of a tile: the first and the last half of its classes."""
    C: tl.constexpr = tile_cb.shape[0]
    B: tl.constexpr = tile_cb.shape[1]
    return tl.split(tl.permute(tl.reshape(tile_cb, (C, 2, B // 2)), (0, 2, 1)))


@functools.cache  # the query takes torch 5 microseconds
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors; 2 on the CPU, for Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return a tensor descriptor that loads and stores boxes of rows x columns."""
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])


def described(term: tuple[Tensor, Tensor]) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return tensor descriptors of a term's input and weight."""
    x_CD, weight_BD = term
    return describe(x_CD, BLOCK_C, BLOCK_D), describe(weight_BD, BLOCK_B, BLOCK_D)
