"""Provide what the Triton kernels share: a tile of scores, from its product to its gradient.

BASE_2: scores z are multiplied by log2(e), so that an exponential is one instruction. Half
precision without a floating-point bias uses base 2. Other calls keep natural units: a bias of -1e9,
or of the lowest finite number, has to keep its value, and float32 weights are exact only as the
exponential of a difference of scores (decision 0055).

Indices i of queries and j of keys are rows or columns that broadcast against each other. For a tile
[queries, keys] a kernel passes i[:, None] and j[None, :]; for a transposed one, [keys, queries], it
passes i[None, :] and j[:, None].

Shapes: B batches, H heads; I rows of a matrix (M queries or N keys), F features. p are weights, dz
the gradient of z; do is the upstream gradient of the result, v a value, D dropout's factor.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.triton_helpers import tanh_and_room
from lowtide.ops.attention.triton_backend.kernels.bf16_split import STEP, next_piece

LOG2E = tl.constexpr(1.4426950408889634)
# The lowest finite float32: the shift of a row that has seen no key yet. No finite score is below.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def multiple(F, DIVISOR: tl.constexpr):
    """Return F in a form that shows Triton that DIVISOR, if above 1, divides it.

    Triton detects by itself whether 16 divides an argument, but no other divisor. Without a known
    divisor, it loads a tile's rows one element at a time.
    """
    if DIVISOR > 1:
        F = F // DIVISOR * DIVISOR
    return F


@triton.jit
def multiples(strides, DIVISOR: tl.constexpr):
    """Return the strides of [B, H, I, F], showing Triton that DIVISOR divides all but the last.

    DIVISOR is a kernel's CUT_K, CUT_E or BIAS_STEP. If it is 0 (all blocks are full) or 1, return
    the strides unchanged.
    """
    if DIVISOR > 1:
        strides = (
            multiple(strides[0], DIVISOR),
            multiple(strides[1], DIVISOR),
            multiple(strides[2], DIVISOR),
            strides[3],
        )
    return strides


@triton.jit
def load_tile(place, f, F, CUT_I: tl.constexpr, CUT_F: tl.constexpr):
    """Load X[start + i, f] of a matrix [I, F] at place = (pointer, start, i, strides, I).

    CUT_I, CUT_F: the tile may reach beyond the matrix's rows, or its features; outside, return 0.
    The start is a scalar, and the other offsets are the same for every tile of a loop. So a tile
    costs the computation of one address, not of one per thread.
    """
    ptr, start, i, strides, I = place
    ptr += tl.cast(start, tl.int64) * strides[2]
    ptrs = ptr + (i[:, None] * strides[2] + f[None, :] * strides[3])
    if CUT_I and CUT_F:
        tile = tl.load(ptrs, mask=(start + i < I)[:, None] & (f < F)[None, :], other=0.0)
    elif CUT_I:
        tile = tl.load(ptrs, mask=(start + i < I)[:, None], other=0.0)
    elif CUT_F:
        tile = tl.load(ptrs, mask=(f < F)[None, :], other=0.0)
    else:
        tile = tl.load(ptrs)
    return tile


@triton.jit
def store_tile(ptr, i, f, strides, I, F, tile):
    """Store a tile of a matrix [I, F] at rows i and features f, in the matrix's dtype."""
    offsets = i.to(tl.int64)[:, None] * strides[2] + f.to(tl.int64)[None, :] * strides[3]
    tl.store(ptr + offsets, tile.to(ptr.dtype.element_ty), mask=(i < I)[:, None] & (f < F)[None, :])


@triton.jit
def load_rows(ptr, i, M, CUT: tl.constexpr):
    """Load one number for each of the rows i; with CUT, return 0 beyond the last row."""
    if CUT:
        rows = tl.load(ptr + i, mask=i < M, other=0.0)
    else:
        rows = tl.load(ptr + i)
    return rows


@triton.jit
def head(ptr, strides, b, h):
    """Return the pointer to the matrix of one batch and head."""
    return ptr + b.to(tl.int64) * strides[0] + h.to(tl.int64) * strides[1]


@triton.jit
def load_pieces(place, f, F, CUT_I: tl.constexpr, CUT_F: tl.constexpr, PIECES: tl.constexpr):
    """Load a tile of a matrix, or the tiles of its bfloat16 pieces as a tuple (bf16_split.py).

    Pieces in memory are strides[4] apart, and their rows are padded. If the matrix is still
    float32, its tile is split here, into the same pieces.
    """
    ptr, start, i, strides, I = place
    if PIECES == 1:
        tile = load_tile(place, f, F, CUT_I, CUT_F)
    elif ptr.dtype.element_ty == tl.float32:
        first, rest = next_piece(load_tile(place, f, F, CUT_I, CUT_F))
        second, rest = next_piece(rest)
        tile = first.to(tl.bfloat16, bitcast=True), second.to(tl.bfloat16, bitcast=True)
        if PIECES > 2:
            third, rest = next_piece(rest)
            tile = tile[0], tile[1], third.to(tl.bfloat16, bitcast=True)
    else:
        width = tl.cdiv(F, STEP) * STEP
        piece_stride = tl.cast(strides[4], tl.int64)
        first = load_tile(place, f, width, CUT_I, CUT_F)
        second = load_tile((ptr + piece_stride, start, i, strides, I), f, width, CUT_I, CUT_F)
        tile = first, second
        if PIECES > 2:
            third = load_tile((ptr + 2 * piece_stride, start, i, strides, I), f, width, CUT_I, CUT_F)
            tile = first, second, third
    return tile


@triton.jit
def to_pieces(tile, like, PIECES: tl.constexpr):
    """Convert a float32 tile for a product with `like`: to the dtype of `like`, or to pieces."""
    if PIECES == 1:
        found = tile.to(like.dtype)
    else:
        first = tile.to(tl.bfloat16)
        rest = tile - first.to(tl.float32)
        second = rest.to(tl.bfloat16)
        if PIECES > 2:
            found = first, second, (rest - second.to(tl.float32)).to(tl.bfloat16)
        else:
            found = first, second
    return found


@triton.jit
def dot(a, b, tile, PRECISION: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return tile + a b, or tile + a b^T if TRANSPOSED."""
    if TRANSPOSED:
        b = tl.trans(b)
    if PRECISION == "ieee" and a.dtype == tl.bfloat16:  # the interpreter would multiply raw bits
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, tile, input_precision=PRECISION)


@triton.jit
def dot_pieces(a, b, tile, PRECISION: tl.constexpr, PIECES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return what `dot` returns, for operands that may be in pieces.

    Operands of two pieces take three products, operands of three pieces six. The smallest products
    are added first. Products that are left out are as small as the digits that pieces do not hold.
    """
    if PIECES == 1:
        tile = dot(a, b, tile, PRECISION, TRANSPOSED)
    else:
        if PIECES > 2:
            tile = dot(a[2], b[0], tile, PRECISION, TRANSPOSED)
            tile = dot(a[1], b[1], tile, PRECISION, TRANSPOSED)
            tile = dot(a[0], b[2], tile, PRECISION, TRANSPOSED)
        tile = dot(a[1], b[0], tile, PRECISION, TRANSPOSED)
        tile = dot(a[0], b[1], tile, PRECISION, TRANSPOSED)
        tile = dot(a[0], b[0], tile, PRECISION, TRANSPOSED)
    return tile


@triton.jit
def add_pieces(a, b, tile, PRECISION: tl.constexpr, PIECES: tl.constexpr, TRANSPOSED: tl.constexpr):
    """Return what `dot_pieces` returns, with the products of three pieces added up apart.

    Tensor cores round the sum towards 0 with every addition. So the six products are first added up
    from 0, and then joined to the tile.
    """
    if PIECES > 2:
        tile += dot_pieces(a, b, tl.zeros_like(tile), PRECISION, PIECES, TRANSPOSED)
    else:
        tile = dot_pieces(a, b, tile, PRECISION, PIECES, TRANSPOSED)
    return tile


@triton.jit
def add_product(a, b, total, PRECISION: tl.constexpr, PIECES: tl.constexpr):
    """Return total + a b, for a float32 tile a and a tile b that may be in pieces."""
    return add_pieces(to_pieces(a, b, PIECES), b, total, PRECISION, PIECES, False)


@triton.jit
def product(
    a, b, a_place, b_place, F, tile, PRECISION: tl.constexpr, BLOCKS: tl.constexpr,
    CUT_A: tl.constexpr, CUT_B: tl.constexpr, CUT_F: tl.constexpr, PIECES: tl.constexpr = 1,
):  # fmt: skip
    """Return tile + a b^T over all features.

    The tiles a and b, loaded already, hold all features or the first block of them.
    """
    tile = dot_pieces(a, b, tile, PRECISION, PIECES, True)
    if BLOCKS > 1:
        BLOCK: tl.constexpr = a.shape[1] if PIECES == 1 else a[0].shape[1]
        for block in range(1, BLOCKS):
            f = block * BLOCK + tl.arange(0, BLOCK)
            next_a = load_pieces(a_place, f, F, CUT_A, CUT_F, PIECES)
            next_b = load_pieces(b_place, f, F, CUT_B, CUT_F, PIECES)
            tile = add_pieces(next_a, next_b, tile, PRECISION, PIECES, True)
    return tile


@triton.jit
def load_bias(ptr, strides, i, j, M, N, COLUMN_BIAS: tl.constexpr, BIAS_STEP: tl.constexpr):
    """Load the bias of queries i and keys j, with 0 outside; return None if there is no bias.

    COLUMN_BIAS: the bias is the same for all queries. BIAS_STEP: a divisor of N and the strides
    (multiple). Kernels call this before the product q k^T, so that the loads overlap with the
    product.
    """
    bias = ptr
    if ptr is not None:
        N = multiple(N, BIAS_STEP)
        if COLUMN_BIAS:
            bias = tl.load(ptr + j.to(tl.int64) * strides[3], mask=j < N, other=0)
        else:
            offsets = i.to(tl.int64) * strides[2] + j.to(tl.int64) * strides[3]
            bias = tl.load(ptr + offsets, mask=(i < M) & (j < N), other=0)
    return bias


@triton.jit
def score_tile(
    product, bias, j, first, end, scale, SOFTCAP: tl.constexpr, BASE_2: tl.constexpr, MASKED: tl.constexpr
):
    """Return the softmax's input z and 1 - |tanh| for the soft cap's slope (undefined without cap).

    product: a tile of q k^T. bias: as load_bias returns it. first, end: a query sees the keys
    first <= j < end. MASKED: some scores of the tile may be hidden.
    """
    unit: tl.constexpr = LOG2E if BASE_2 else 1.0
    # Round z here, with an fma. The row's maximum is a rounded z. If the compiler fused this
    # product with the subtraction of the maximum, the difference would not be 0 even for the
    # largest score.
    added = 0.0
    if bias is not None:  # noqa: SIM102  Triton looks at both sides of an "and"
        if bias.dtype != tl.uint8:
            added = bias.to(tl.float32)
    if SOFTCAP > 0:
        capped, room = tanh_and_room(product * (scale / SOFTCAP))
        z = tl.fma(capped, SOFTCAP * unit, added)
    else:
        room = product
        z = tl.fma(product, scale * unit, added)
    if bias is not None:  # noqa: SIM102
        if bias.dtype == tl.uint8:  # a bool bias: False hides a score
            z = tl.where(bias != 0, z, -float("inf"))
    if MASKED:
        z = tl.where((j >= first) & (j < end), z, -float("inf"))
    return z, room


@triton.jit
def weights(z, shift, log2_sum, BASE_2: tl.constexpr):
    """Return exp(z - shift) / 2^log2_sum, or 2^(z - shift) in base 2.

    In base 2 the shift contains log2_sum. In natural units z - shift is computed first, since it is
    exact where both are large.
    """
    if BASE_2:
        power = z - shift
    else:
        power = (z - shift) * LOG2E - log2_sum
    return tl.exp2(power)


@triton.jit
def store_statistics(ptr, bh, i, M, max_m, sum_m, BASE_2: tl.constexpr):
    """Store the statistics of some rows in natural units (Operands.statistics_shape)."""
    nothing_m = sum_m == 0.0
    log_sum_m = tl.where(nothing_m, -float("inf"), tl.log2(tl.where(nothing_m, 1.0, sum_m)) / LOG2E)
    if BASE_2:
        max_m = tl.where(nothing_m, LOWEST, max_m / LOG2E)
    ptr += bh.to(tl.int64) * (2 * M) + i
    tl.store(ptr, max_m, mask=i < M)
    tl.store(ptr + M, log_sum_m, mask=i < M)


@triton.jit
def keep_mask(row_key_ptr, column_key_ptr, i, j, M, N, limit):
    """Return True for each score that dropout keeps, with the bits of definition/dropout.py."""
    bits = tl.load(row_key_ptr + i, mask=i < M, other=0) ^ tl.load(column_key_ptr + j, mask=j < N, other=0)
    bits = bits.to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x7FEB352D
    bits ^= bits >> 15
    bits *= 0x846CA68B
    return bits.to(tl.int32, bitcast=True) > limit


@triton.jit
def row_terms_at(row_terms_ptr, bh, M, BASE_2: tl.constexpr):
    """Return the pointer to the row_terms of one batch and head (recompute.delta_kernel)."""
    return row_terms_ptr + bh.to(tl.int64) * ((2 if BASE_2 else 3) * M)


@triton.jit
def load_shift(row_terms_ptr, i, M, CUT: tl.constexpr, BASE_2: tl.constexpr):
    """Load the shift and log2_sum of rows i for `weights`; in base 2 return the shift twice."""
    shift = load_rows(row_terms_ptr + M, i, M, CUT)
    log2_sum = shift
    if not BASE_2:
        log2_sum = load_rows(row_terms_ptr + 2 * M, i, M, CUT)
    return shift, log2_sum


@triton.jit
def score_gradient(weight, grad_weight, delta, keep_mask, rescale, DROPOUT: tl.constexpr):
    """Return dz = p (D do v^T - delta) from the weights p and grad_weight = do v^T."""
    if DROPOUT:
        grad_weight = tl.where(keep_mask, grad_weight * rescale, 0.0)
    return weight * (grad_weight - delta)


@triton.jit
def scores_at(ptr, strides, head, start_n):
    """Return the pointer to one head's keys from start_n on, in what a strip stores."""
    return ptr + tl.cast(head, tl.int64) * strides[0] + tl.cast(start_n, tl.int64) * strides[1]


@triton.jit
def store_scores(ptr, strides, n, i, tile, CUT: tl.constexpr):
    """Store a tile [keys, queries] in a strip's memory, padding included.

    A stored row is padded to strides[1] queries, and the padding is stored too, so that each store
    has 16 bytes.
    """
    ptrs = ptr + (n[:, None] * strides[1] + i[None, :])
    tile = tile.to(ptr.dtype.element_ty)
    if CUT:
        tl.store(ptrs, tile, mask=(i < strides[1])[None, :])
    else:
        tl.store(ptrs, tile)
