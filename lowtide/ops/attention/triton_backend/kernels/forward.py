"""Compute attention in Triton: an online softmax over the key tiles that a tile of queries sees.

A program takes a tile of queries of one head and a block of the values' features. tile_sizes.py has
the sizes. The program writes its tile of the result and, if asked for, the statistics of its rows.

Shapes: B batches; H query heads, R of them per key head; M queries, N keys; K features of queries
and keys, E of values.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    LOWEST,
    add_product,
    head,
    keep_mask,
    load_bias,
    load_pieces,
    multiple,
    multiples,
    product,
    score_tile,
    store_statistics,
    store_tile,
    weights,
)
from lowtide.ops.attention.triton_backend.kernels.visible import (
    interval,
    shown_range,
    tile_start,
    visible_range,
    visible_tiles,
)


@remember_launches
@triton.jit
def forward_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    out_ptr, low_ptr, statistics_ptr,
    query_strides, key_strides, value_strides, bias_strides, out_strides,
    H, R, M, N, K, E, tiles, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write a tile of the result and, if asked for, its low half and the statistics of its rows.

    The low half is what rounding to half precision takes off the result; it has the result's
    strides. PIECES is the number of pieces of query, key and value (bf16_split.py). Rows of pieces
    are padded.
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides, out_strides = multiples(value_strides, CUT_E), multiples(out_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    start_m = (tiles - 1 - tile) * BLOCK_M  # begin with the last: a causal mask shows it most keys
    b, h = bh // H, bh % H
    query_ptr, out_ptr = head(query_ptr, query_strides, b, h), head(out_ptr, out_strides, b, h)
    key_ptr, value_ptr = head(key_ptr, key_strides, b, h // R), head(value_ptr, value_strides, b, h // R)
    if bias_ptr is not None:
        bias_ptr = head(bias_ptr, bias_strides, b, h)
    if row_key_ptr is not None:
        row_key_ptr += bh.to(tl.int64) * M

    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k, e = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    i = start_m + row_m
    query_place = query_ptr, start_m, row_m, query_strides, M
    query = load_pieces(query_place, k, K, True, CUT_K, PIECES)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, whole_low, whole_high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    low, whole_low, whole_high, high = shown_range(
        bias_ptr, bias_strides, low, whole_low, whole_high, high, N, COLUMN_BIAS, BLOCK_N
    )
    max_m = tl.full([BLOCK_M], LOWEST, tl.float32)
    sum_m = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    first_tile, whole_first, whole_last, wholes, rest = visible_tiles(
        low, whole_low, whole_high, high, BLOCK_N
    )
    for MASKED in tl.static_range(2):
        for step in tl.range(0, rest if MASKED else wholes, num_stages=1 if MASKED else None):
            start_n = tile_start(step, first_tile, whole_first, whole_last, BLOCK_N, MASKED)
            key_place = key_ptr, start_n, row_n, key_strides, N
            key = load_pieces(key_place, k, K, MASKED, CUT_K, PIECES)
            j = start_n + row_n
            bias = load_bias(bias_ptr, bias_strides, i[:, None], j[None, :], M, N, COLUMN_BIAS, BIAS_STEP)
            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = product(
                query, key, query_place, key_place, K, zero, PRECISION, BLOCKS_K,
                True, MASKED, CUT_K, PIECES,
            )  # fmt: skip
            z, _ = score_tile(
                scores, bias, j[None, :], first[:, None], end[:, None], scale, SOFTCAP, BASE_2, MASKED
            )
            new_max_m = tl.maximum(max_m, tl.max(z, 1))
            weight = weights(z, new_max_m[:, None], 0.0, BASE_2)
            fade_m = weights(max_m, new_max_m, 0.0, BASE_2)
            max_m = new_max_m
            sum_m = sum_m * fade_m + tl.sum(weight, 1)
            if row_key_ptr is not None:
                weight = tl.where(
                    keep_mask(row_key_ptr, column_key_ptr, i[:, None], j[None, :], M, N, limit), weight, 0.0
                )
            value_place = value_ptr, start_n, row_n, value_strides, N
            value = load_pieces(value_place, e, E, MASKED, CUT_E, PIECES)
            out = add_product(weight, value, out * fade_m[:, None], PRECISION, PIECES)

    divisor_m = tl.where(sum_m == 0.0, 1.0, sum_m)  # 0: a row that sees no key, whose result is 0
    out *= (rescale / divisor_m)[:, None]
    rounded = out.to(out_ptr.dtype.element_ty)
    if low_ptr is not None:
        low_ptr = head(low_ptr, out_strides, b, h)
        store_tile(low_ptr, i, e, out_strides, M, E, out - rounded.to(tl.float32))
    store_tile(out_ptr, i, e, out_strides, M, E, rounded)
    if statistics_ptr is not None and tl.program_id(1) == 0:
        store_statistics(statistics_ptr, bh, i, M, max_m, sum_m, BASE_2)
