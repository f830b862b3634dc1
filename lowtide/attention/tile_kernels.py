"""What the Triton kernels have in common: a tile of scores, from its product to what is exponentiated.

Scores are in base 2: z2 = z log2(e), so that an exponential is one instruction. Indices i of queries and j of
keys are columns or rows of numbers that broadcast against each other; a kernel that wants a tile the other
way round passes them the other way round.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
# Finite, so that a row that has seen nothing yet is shifted by a number.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def load_tile(ptr, i, j, strides, I, J):
    """X[i, j] of a tensor [., ., I, J]; 0 outside."""
    offsets = i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    return tl.load(ptr + offsets, mask=(i < I) & (j < J), other=0.0)


@triton.jit
def store_tile(ptr, i, j, strides, I, J, tile):
    offsets = i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
    tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask=(i < I) & (j < J))


@triton.jit
def head(ptr, strides, b, h):
    """Where the matrix of one batch and head begins."""
    return ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def product(
    a, a_ptr, a_i, a_strides, a_rows,
    b_ptr, b_i, b_strides, b_rows,
    features, tile, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """tile + a b^T, over all features, of which a tile of `a` that is loaded already has all or the first."""
    f = tl.arange(0, BLOCK)
    b = load_tile(b_ptr, b_i[:, None], f[None, :], b_strides, b_rows, features)
    tile = tl.dot(a, tl.trans(b), tile, input_precision=PRECISION)
    if BLOCKS > 1:
        for block in range(1, BLOCKS):
            g = block * BLOCK + f
            a = load_tile(a_ptr, a_i[:, None], g[None, :], a_strides, a_rows, features)
            b = load_tile(b_ptr, b_i[:, None], g[None, :], b_strides, b_rows, features)
            tile = tl.dot(a, tl.trans(b), tile, input_precision=PRECISION)
    return tile


@triton.jit
def tanh(x):
    """To a few units in the last place; near 0, where (1 - e) / (1 + e) loses its digits, by its series."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - power) / (1.0 + power)
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def finished(
    product, i, j, first, end, inside, bias_ptr, bias_strides, M, N, scale, SOFTCAP: tl.constexpr
):  # fmt: skip
    """z2, and the soft cap's tanh (without one, anything); `inside`: no score of the tile is hidden."""
    capped = product
    if SOFTCAP > 0:
        capped = tanh(product * (scale / SOFTCAP))
        z2 = capped * (SOFTCAP * LOG2E)
    else:
        z2 = product * (scale * LOG2E)
    if bias_ptr is not None:
        offsets = i.to(tl.int64) * bias_strides[2] + j.to(tl.int64) * bias_strides[3]
        bias = tl.load(bias_ptr + offsets, mask=(i < M) & (j < N), other=0)
        if bias_ptr.dtype.element_ty == tl.uint8:  # bool: whether a score takes part
            z2 = tl.where(bias != 0, z2, -float("inf"))
        else:
            z2 += bias.to(tl.float32) * LOG2E
    if not inside:
        z2 = tl.where((j >= first) & (j < end), z2, -float("inf"))
    return z2, capped


@triton.jit
def seen_of_rows(first_ptr, end_ptr, start, BLOCK: tl.constexpr, M, N):
    """Of the rows from `start` on: the columns that some row sees, and those that every row does."""
    if first_ptr is None:
        low, whole_low, whole_high, high = 0, 0, N, N
    else:
        last = tl.minimum(start + BLOCK, M) - 1  # neither vector ever goes back
        low, whole_low = tl.load(first_ptr + start), tl.load(first_ptr + last)
        whole_high, high = tl.load(end_ptr + start), tl.load(end_ptr + last)
    return low, whole_low, whole_high, high


@triton.jit
def interval(first_ptr, end_ptr, i, M, N):
    """Of each row; a row beyond the last sees nothing."""
    if first_ptr is None:
        first, end = tl.zeros_like(i), tl.where(i < M, N, 0)
    else:
        first = tl.load(first_ptr + i, mask=i < M, other=0)
        end = tl.load(end_ptr + i, mask=i < M, other=0)
    return first, end


@triton.jit
def kept(row_key_ptr, column_key_ptr, i, j, M, N, limit):
    """dropout.py, bit for bit: whether each score stays."""
    bits = tl.load(row_key_ptr + i, mask=i < M, other=0) ^ tl.load(column_key_ptr + j, mask=j < N, other=0)
    bits = bits.to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits.to(tl.int32, bitcast=True) > limit
