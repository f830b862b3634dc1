"""Split float32 into bfloat16 pieces, x = x1 + x2 + x3, so that tensor cores can multiply it.

Products of bfloat16 are sixteen times as fast as those of float32. Each piece is the remainder that
the pieces before it leave of x, rounded to bfloat16. Three pieces hold all 24 binary digits of x if
|x| is above 1e-33; the last digits of smaller numbers are below the range of bfloat16. Two pieces
are within 2^-17 |x| of x.

Operands that a kernel loads in a loop are split once, in memory. Two pieces take as much memory as
the operands themselves, three take 1.5 times as much. Operands that a program loads only once are
split by the program, into the same pieces (tiles.load_pieces).

Shapes: B batches, H heads, M rows (of queries or keys), F features.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv, next_power_of_2
from lowtide.core.kernels.launch import remember_launches

# Rows of pieces are padded to a multiple of this many features. So loads of 16 bytes are aligned,
# masked loads too.
STEP = tl.constexpr(16)
# TILE: the elements that a program splits at a time. WIDTH: the most features of a row among them.
TILE, WIDTH = 4096, 128


def piece_count(dtype: torch.dtype) -> int:
    """Return the number of pieces of each operand; 1 for half precision, which is not split.

    Float32 has three pieces, whose six products are more exact than one product in float32. If
    torch allows TF32, it has two, whose three products are more exact than one product in TF32
    (decision 0021).
    """
    if dtype.itemsize == 2:
        return 1
    return 2 if _allows_tf32() else 3


def precision() -> str:
    """Return Triton's input_precision for products of float32 operands that are not split.

    "bf16x6" means six products of three bfloat16 pieces that Triton makes. "bf16x3" means three
    products of two pieces, if torch allows TF32, so that all products err alike (decision 0104).
    "ieee" is for Triton's interpreter and ROCm.
    """
    if triton.knobs.runtime.interpret or torch.version.hip is not None:
        return "ieee"
    return "bf16x3" if _allows_tf32() else "bf16x6"


def _allows_tf32() -> bool:
    """Return True if torch may use TF32 in float32 products."""
    # Reading allow_tf32 raises an error once the newer setting, fp32_precision, has been used.
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def split(tensors: Sequence[Tensor], count: int) -> list[Tensor]:
    """Return the pieces of each float32 tensor [B, H, M, F] as [count, B, H, M, F] in bfloat16.

    The tensors may have any strides. In memory, the rows of a piece follow each other. Each row is
    padded with zeros to a multiple of 16 features (`padded_width`).

    The first piece of an infinity or a NaN is that value, and its other pieces are 0. A finite
    number has finite pieces.
    """
    found = [
        torch.empty(
            count, *each.shape[:3], padded_width(each.shape[3]), dtype=torch.bfloat16, device=each.device
        )
        for each in tensors
    ]
    block = min(next_power_of_2(max(each.shape[4] for each in found)), WIDTH)
    rows = TILE // block
    programs = max(each.shape[1] * each.shape[2] * cdiv(each.shape[3], rows) for each in found)
    if programs:
        split_kernel[(programs, len(found))](
            tuple(tensors), tuple(each.view(torch.int16) for each in found),
            tuple(each.stride() for each in tensors), tuple(tuple(each.shape) for each in tensors),
            COUNT=count, BLOCK_M=rows, BLOCK_F=block,
        )  # fmt: skip
    return [each[..., : tensor.shape[3]] for each, tensor in zip(found, tensors)]


def padded_width(F: int) -> int:
    """Return the number of features of a padded row."""
    return cdiv(F, STEP.value) * STEP.value


@remember_launches
@triton.jit
def split_kernel(
    ptrs, pieces_ptrs, strides, shapes, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """Split all operands in one launch.

    One launch per operand took 27 us for each of them on an H200, with 64 features and with 128.
    Most of that was the time of the launch itself.
    """
    for operand in tl.static_range(len(ptrs)):
        if tl.program_id(1) == operand:
            split_tile(
                ptrs[operand], pieces_ptrs[operand], strides[operand], shapes[operand],
                COUNT, BLOCK_M, BLOCK_F,
            )  # fmt: skip


@triton.jit
def split_tile(
    ptr, pieces_ptr, strides, shape, COUNT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr
):  # fmt: skip
    """Split one tile of one operand."""
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
                bits, rest = next_piece(rest)
                to_ptrs = pieces_ptr + piece_stride * piece + (i * width + f)
                tl.store(to_ptrs, bits, mask=(i < M) & (f < width))


@triton.jit
def next_piece(x):
    """Return the bits of x rounded to bfloat16, as int16, and the remainder of x."""
    bits = round_bits(x)
    rest = x - bits.to(tl.float32, bitcast=True)
    # inf - inf and NaN - NaN are NaN: their remainder is 0.
    return (bits >> 16).to(tl.int16), tl.where(rest == rest, rest, 0.0)


@triton.jit
def round_bits(x):
    """Return the bits of x rounded to bfloat16, with the lower 16 bits 0.

    Ties round away from 0. A finite number that would become infinite is truncated instead.
    """
    bits = x.to(tl.int32, bitcast=True)
    half = tl.where((bits & 0x7FFFFFFF) < 0x7F7F8000, 0x8000, 0)
    return tl.where(x == x, (bits + half) & -0x10000, 0x7FC00000)
