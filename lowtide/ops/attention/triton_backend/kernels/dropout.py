"""Compute dropout's keys in Triton, with the same bits as definition/dropout.py.

One launch does what takes forty launches in torch.

Shapes: B batches, H heads, M queries, N keys.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.attention.definition import dropout

FIRST, SECOND = tl.constexpr(dropout.FIRST), tl.constexpr(dropout.SECOND)
GOLDEN = tl.constexpr(dropout.GOLDEN)


@triton.jit
def mix(bits):
    """Return the hash lowbias32 of uint32 numbers."""
    bits ^= bits >> 16
    bits *= FIRST
    bits ^= bits >> 15
    bits *= SECOND
    return bits ^ (bits >> 16)


@triton.jit
def chain(key, value):
    """Return the hash of a key and one more index."""
    return mix((key + GOLDEN) ^ value.to(tl.uint32))


@remember_launches
@triton.jit
def dropout_keys_kernel(
    seed_ptr, row_key_ptr, column_key_ptr, rows, row_programs, H, M, N, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write row_key [B, H, M] and column_key [N].

    rows: the number of row keys, B H M. The first row_programs programs write row keys, and the
    others write column keys.
    """
    seed = tl.load(seed_ptr)
    own = chain(mix(seed.to(tl.uint32)), seed >> 32)
    program = tl.program_id(0)
    if program < row_programs:
        at = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        key = chain(chain(chain(own, at // M // H), at // M % H), at % M)
        tl.store(row_key_ptr + at, key.to(tl.int32, bitcast=True), mask=at < rows)
    else:
        j = (program - row_programs) * BLOCK + tl.arange(0, BLOCK)
        key = chain(mix((own + GOLDEN) ^ GOLDEN), j)
        tl.store(column_key_ptr + j, key.to(tl.int32, bitcast=True), mask=j < N)
