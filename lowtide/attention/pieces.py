"""Float32 as a sum of bfloat16 pieces, x = x1 + x2 + x3, each the rounding of what is left: so that tensor
cores, which are sixteen times as fast there as in float32, multiply it.

Three pieces are x itself, all of its 24 digits (but of what is below 1e-33, where bfloat16 ends); two are
within 2^-17 |x| of it. Operands are cut once, in memory: two pieces take as much of it as they do themselves,
three 1.5 times as much.

Shapes: B batches, H heads, M rows (of queries or keys), F features.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.attention.blocks import cdiv, next_power_of_2

# Rows are a multiple of these features long, so that loads of 16 bytes are aligned, masks and all.
STEP = tl.constexpr(16)
# Elements of a program, and its features.
TILE, WIDTH = 4096, 128


def in_pieces(tensor: Tensor, count: int) -> Tensor:
    """[count, B, H, M, F], bfloat16, of a float32 [B, H, M, F] of any strides. In memory a row is padded with
    zeros to a multiple of 16 features (`padded`), and rows follow each other.

    The first piece of an infinity or a nan is that, the others are 0; a finite number has finite pieces.
    """
    B, H, M, F = tensor.shape
    width = padded(F)
    found = torch.empty(count, B, H, M, width, dtype=torch.bfloat16, device=tensor.device)
    if found.numel():
        block = min(next_power_of_2(width), WIDTH)
        tiles = cdiv(M, TILE // block)
        pieces_kernel[(B * H * tiles,)](
            tensor, found.view(torch.int16), tensor.stride(), H, M, F, width, B * H * M * width, tiles,
            COUNT=count, BLOCK_M=TILE // block, BLOCK_F=block,
        )  # fmt: skip
    return found[..., :F]


def padded(F: int) -> int:
    return cdiv(F, STEP.value) * STEP.value


@triton.jit
def pieces_kernel(
    ptr, pieces_ptr, strides, H, M, F, width, piece_stride, tiles,
    COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    i = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    ptr += bh // H * strides[0] + bh % H * strides[1]
    pieces_ptr += bh * M * width
    for start in range(0, width, BLOCK_F):
        f = start + tl.arange(0, BLOCK_F)[None, :]
        rest = tl.load(ptr + i * strides[2] + f.to(tl.int64) * strides[3], mask=(i < M) & (f < F), other=0.0)
        for piece in tl.static_range(COUNT):
            bits = rounded(rest)
            to_ptr = pieces_ptr + tl.cast(piece_stride, tl.int64) * piece
            tl.store(to_ptr + (i * width + f), (bits >> 16).to(tl.int16), mask=(i < M) & (f < width))
            rest -= bits.to(tl.float32, bitcast=True)
            rest = tl.where(rest == rest, rest, 0.0)  # of inf - inf


@triton.jit
def rounded(x):
    """The bits of x, the lower half 0. Half a unit goes away from 0; not what would become infinite."""
    bits = x.to(tl.int32, bitcast=True)
    half = tl.where((bits & 0x7FFFFFFF) < 0x7F7F8000, 0x8000, 0)
    return tl.where(x == x, (bits + half) & -0x10000, 0x7FC00000)
