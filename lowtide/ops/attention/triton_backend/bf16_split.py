"""Float32 as a sum of bfloat16 pieces, x = x1 + x2 + x3, each the rounding of what is left: so that tensor
cores, which are sixteen times as fast there as in float32, multiply it.

Three pieces are x itself, all of its 24 digits (but of what is below 1e-33, where bfloat16 ends); two are
within 2^-17 |x| of it. Operands are cut once, in memory: two pieces take as much of it as they do themselves,
three 1.5 times as much.

Shapes: B batches, H heads, M rows (of queries or keys), F features.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.ops.attention.triton_backend.tile_sizes import cdiv, next_power_of_2

# Rows are a multiple of these features long, so that loads of 16 bytes are aligned, masks and all.
STEP = tl.constexpr(16)
# Elements of a program, and its features.
TILE, WIDTH = 4096, 128


def pieces(dtype: torch.dtype) -> int:
    """Of each operand: three of float32, whose six products are more exact than one in float32; two where
    torch is allowed TF32, whose three are more exact than one in that (decision 0021)."""
    if dtype.itemsize == 2:
        return 1
    return 2 if _allows_tf32() else 3


def precision() -> str:
    """Of float32 products of what is not in pieces (query_gradient_kernel): six of bfloat16 thirds, or one in
    TF32 where torch is allowed that."""
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return "ieee"
    return "tf32" if _allows_tf32() else "bf16x6"


def _allows_tf32() -> bool:
    # Not allow_tf32, which raises once the newer setting has been used.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def in_pieces(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Of each float32 [B, H, M, F], of any strides, its pieces [count, B, H, M, F] in bfloat16. In memory a
    row is padded with zeros to a multiple of 16 features (`padded`), and rows follow each other.

    The first piece of an infinity or a nan is that, the others are 0; a finite number has finite pieces.
    """
    found = [
        torch.empty(count, *each.shape[:3], padded(each.shape[3]), dtype=torch.bfloat16, device=each.device)
        for each in tensors
    ]
    block = min(next_power_of_2(max(each.shape[4] for each in found)), WIDTH)
    rows = TILE // block
    programs = max(each.shape[1] * each.shape[2] * cdiv(each.shape[3], rows) for each in found)
    if programs:
        pieces_kernel[(programs, len(found))](
            tuple(tensors), tuple(each.view(torch.int16) for each in found),
            tuple(each.stride() for each in tensors), tuple(tuple(each.shape) for each in tensors),
            COUNT=count, BLOCK_M=rows, BLOCK_F=block,
        )  # fmt: skip
    return [each[..., : tensor.shape[3]] for each, tensor in zip(found, tensors)]


def padded(F: int) -> int:
    return cdiv(F, STEP.value) * STEP.value


@triton.jit
def pieces_kernel(
    ptrs, pieces_ptrs, strides, shapes, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """One launch for all: apart, each took 27 us on an H200, of 64 features as of 128, mostly to launch."""
    for operand in tl.static_range(len(ptrs)):
        if tl.program_id(1) == operand:
            cut_tile(
                ptrs[operand], pieces_ptrs[operand], strides[operand], shapes[operand],
                COUNT, BLOCK_M, BLOCK_F,
            )  # fmt: skip


@triton.jit
def cut_tile(
    ptr, pieces_ptr, strides, shape, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    B, H, M, F = shape
    tiles, width = tl.maximum(tl.cdiv(M, BLOCK_M), 1), tl.cdiv(F, STEP) * STEP
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    if bh < B * H:
        i = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        ptr += bh // H * strides[0] + bh % H * strides[1]
        pieces_ptr += bh * M * width
        piece_stride = tl.cast(B * H, tl.int64) * M * width
        for start in range(0, width, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)[None, :]
            ptrs = ptr + i * strides[2] + f.to(tl.int64) * strides[3]
            rest = tl.load(ptrs, mask=(i < M) & (f < F), other=0.0)
            for piece in tl.static_range(COUNT):
                bits = rounded(rest)
                to_ptrs = pieces_ptr + piece_stride * piece + (i * width + f)
                tl.store(to_ptrs, (bits >> 16).to(tl.int16), mask=(i < M) & (f < width))
                rest -= bits.to(tl.float32, bitcast=True)
                rest = tl.where(rest == rest, rest, 0.0)  # of inf - inf


@triton.jit
def rounded(x):
    """The bits of x, the lower half 0. Half a unit goes away from 0; not what would become infinite."""
    bits = x.to(tl.int32, bitcast=True)
    half = tl.where((bits & 0x7FFFFFFF) < 0x7F7F8000, 0x8000, 0)
    return tl.where(x == x, (bits + half) & -0x10000, 0x7FC00000)
