"""Compute delta and the sum of weights in float32 for rows with most of their weight on one key.

With weights p, upstream gradient do and dropout's factors D, the gradient of the softmax's input is
dz = p (D (do v^T) - delta). In such a row dz is a small difference, and has the rounding errors of
both its terms. These errors cancel only if delta is the sum of p D (do v^T) over the same products,
bit for bit. The weights p must also sum to 1. Forward's statistics belong to its own products
q k^T, and other kernels round these products differently.

So this kernel computes both sums as a kernel of dz does: in tiles [keys, queries] of the same
sizes, and from operands in pieces if that kernel has pieces. A program returns at once if its tile
of queries has no such row, and leaves row_terms as `delta_kernel` wrote them.

Shapes: B batches; H heads, R query heads per key head; M queries, N keys; K features of queries and
keys, E of values.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    head,
    keep_mask,
    load_bias,
    load_pieces,
    load_shift,
    multiples,
    product,
    row_terms_at,
    score_tile,
    weights,
)
from lowtide.ops.attention.triton_backend.kernels.visible import interval, visible_range

# A row is confident if one key has more than half of its weight. The largest exp(z - maximum) of a
# row is 1, so the sum of these numbers is then below 2, and log2 of the sum is below CONFIDENT.
CONFIDENT = tl.constexpr(1.0)


@remember_launches
@triton.jit(do_not_specialize=["first_head"])
def confident_delta_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    grad_output_ptr, grad_logsumexp_ptr, row_terms_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides, lse_strides,
    B, H, R, M, N, K, E, first_head, tiles, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write delta and log2_sum of a tile of queries of one head, if a row of it is confident.

    Query, key, value and grad_output hold the heads from first_head on.
    """
    bias_strides = multiples(bias_strides, BIAS_STEP)
    start_m, unit = tl.program_id(0) % tiles * BLOCK_M, tl.program_id(0) // tiles
    b, own_h = unit % B, unit // B
    h = first_head + own_h
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i = start_m + row_m
    row_terms_ptr = row_terms_at(row_terms_ptr, b * H + h, M, BASE_2)
    shift_m, log2_sum_m = load_shift(row_terms_ptr, i, M, True, BASE_2)
    confident_m = (log2_sum_m < CONFIDENT) & (i < M)
    if tl.max(confident_m.to(tl.int32), 0) == 0:
        return

    query_ptr = head(query_ptr, query_strides, b, own_h)
    grad_output_ptr = head(grad_output_ptr, grad_output_strides, b, own_h)
    key_ptr = head(key_ptr, key_strides, b, own_h // R)
    value_ptr = head(value_ptr, value_strides, b, own_h // R)
    head_bias_ptr, head_row_key_ptr = bias_ptr, row_key_ptr
    if bias_ptr is not None:
        head_bias_ptr = head(bias_ptr, bias_strides, b, h)
    if row_key_ptr is not None:
        head_row_key_ptr = row_key_ptr + (b * H + h).to(tl.int64) * M
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    query_place = query_ptr, start_m, row_m, query_strides, M
    grad_output_place = grad_output_ptr, start_m, row_m, grad_output_strides, M
    query = load_pieces(query_place, k, K, True, CUT_K, PIECES)
    grad_output = load_pieces(grad_output_place, e, E, True, CUT_E, PIECES)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, _low, _high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    sum_m, delta_m = tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M], tl.float32)
    for tile in tl.range(low // BLOCK_N, tl.cdiv(high, BLOCK_N)):
        start_n = tile * BLOCK_N
        key_place = key_ptr, start_n, row_n, key_strides, N
        value_place = value_ptr, start_n, row_n, value_strides, N
        key = load_pieces(key_place, k, K, True, CUT_K, PIECES)
        value = load_pieces(value_place, e, E, True, CUT_E, PIECES)
        zero = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        scores = product(
            key, query, key_place, query_place, K, zero, PRECISION, BLOCKS_K,
            True, True, CUT_K, PIECES,
        )  # fmt: skip
        grad_weight = product(
            value, grad_output, value_place, grad_output_place, E, zero, PRECISION, BLOCKS_E,
            True, True, CUT_E, PIECES,
        )  # fmt: skip
        j = start_n + row_n
        bias = load_bias(head_bias_ptr, bias_strides, i[None, :], j[:, None], M, N, COLUMN_BIAS, BIAS_STEP)
        z, _ = score_tile(
            scores, bias, j[:, None], first[None, :], end[None, :], scale, SOFTCAP, BASE_2, True
        )
        weight = weights(z, shift_m[None, :], log2_sum_m[None, :], BASE_2)
        sum_m += tl.sum(weight, 0)
        if row_key_ptr is not None:
            keep = keep_mask(head_row_key_ptr, column_key_ptr, i[None, :], j[:, None], M, N, limit)
            grad_weight = tl.where(keep, grad_weight * rescale, 0.0)
        delta_m += tl.sum(weight * grad_weight, 0)
    sum_m = tl.where(sum_m == 0.0, 1.0, sum_m)  # 0: a row that sees no key
    delta_m /= sum_m
    if grad_logsumexp_ptr is not None:
        dlse_ptr = head(grad_logsumexp_ptr, lse_strides, b, h)
        delta_m -= tl.load(dlse_ptr + i.to(tl.int64) * lse_strides[2], mask=i < M, other=0.0)
    tl.store(row_terms_ptr + i, delta_m, mask=i < M)
    tl.store(row_terms_ptr + 2 * M + i, log2_sum_m + tl.log2(sum_m), mask=i < M)
