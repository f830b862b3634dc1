"""What the GEMM kernels in Triton and in Gluon share: the order of tiles, their halves, descriptors.

Shapes: C rows and B columns of a tile.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def tile_at(tile, tiles_c, tiles_b, GROUP: tl.constexpr):
    """Of the rows and of the classes, which tile: GROUP tiles of rows go through all classes together."""
    group_tiles = GROUP * tiles_b
    first_c = tile // group_tiles * GROUP
    height = min(tiles_c - first_c, GROUP)
    return first_c + tile % group_tiles % height, tile % group_tiles // height


@triton.jit
def halves(tile_cb):
    """Of the classes: the first and the second."""
    C: tl.constexpr = tile_cb.shape[0]
    B: tl.constexpr = tile_cb.shape[1]
    return tl.split(tl.permute(tl.reshape(tile_cb, (C, 2, B // 2)), (0, 2, 1)))


@functools.cache  # torch takes 5 microseconds
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def describe(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [rows, columns])
