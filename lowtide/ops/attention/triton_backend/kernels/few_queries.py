"""Compute attention of a few queries with many keys in Triton, as in decoding.

A tile holds the queries of all query heads that share a key head, so each key is read once. The
rows are ordered by query, then by head. If key heads are too few to fill the card, several programs
take a part of a head's keys each, and `merge_parts_kernel` merges their sums.

Shapes: P parts; B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of
queries and keys, E of values.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    LOWEST,
    dot,
    head,
    keep_mask,
    load_tile,
    multiple,
    multiples,
    score_tile,
    store_statistics,
    weights,
)
from lowtide.ops.attention.triton_backend.kernels.visible import (
    interval,
    tile_start,
    visible_range,
    visible_tiles,
)


@triton.jit
def store_result(
    out_ptr, low_ptr, statistics_ptr, out_strides, bh, H, i, M, e, E, out, max_m, sum_m, rescale,
    BASE_2: tl.constexpr,
):  # fmt: skip
    """Store the result of rows (bh, i) and, where memory is given, its low half and statistics."""
    divisor_m = tl.where(sum_m == 0.0, 1.0, sum_m)  # 0: a row that sees no key, whose result is 0
    out *= (rescale / divisor_m)[:, None]
    rounded = out.to(out_ptr.dtype.element_ty)
    row = (bh // H).to(tl.int64) * out_strides[0] + (bh % H).to(tl.int64) * out_strides[1]
    row += i.to(tl.int64) * out_strides[2]
    offsets = row[:, None] + e.to(tl.int64)[None, :] * out_strides[3]
    seen = (i < M)[:, None] & (e < E)[None, :]
    tl.store(out_ptr + offsets, rounded, mask=seen)
    if low_ptr is not None:
        tl.store(low_ptr + offsets, (out - rounded.to(tl.float32)).to(low_ptr.dtype.element_ty), mask=seen)
    if statistics_ptr is not None:
        store_statistics(statistics_ptr, bh, i, M, max_m, sum_m, BASE_2)


@remember_launches
@triton.jit
def few_queries_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    out_ptr, low_ptr, statistics_ptr, part_ptr, part_sums_ptr,
    query_strides, key_strides, value_strides, bias_strides, out_strides,
    H, R, M, N, K, E, parts, keys, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write the result of one key head's queries, or their sums over one part of the keys.

    keys: the number of keys of a part. If there is more than one part, each part writes its
    weighted sum of values to part [P, B, H, M, E]. To part_sums [P, 2, B, H, M] it writes the
    maximum score and the sum of weights of each row.
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides, out_strides = multiples(value_strides, CUT_E), multiples(out_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    part, bg = tl.program_id(0) % parts, tl.program_id(0) // parts
    G = H // R
    b, g = bg // G, bg % G
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    i, h = row_m // R, g * R + row_m % R
    own_rows = h.to(tl.int64) * query_strides[1] + i.to(tl.int64) * query_strides[2]
    query_ptrs = (
        query_ptr + b.to(tl.int64) * query_strides[0] + own_rows[:, None] + k[None, :] * query_strides[3]
    )
    query = tl.load(query_ptrs, mask=(i < M)[:, None] & (k < K)[None, :], other=0.0)
    key_ptr, value_ptr = head(key_ptr, key_strides, b, g), head(value_ptr, value_strides, b, g)
    bias_rows = own_rows
    if bias_ptr is not None:
        bias_ptr += b.to(tl.int64) * bias_strides[0]
        bias_rows = h.to(tl.int64) * bias_strides[1] + i.to(tl.int64) * bias_strides[2]
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, whole_low, whole_high, high = visible_range(first_ptr, end_ptr, 0, BLOCK_M, M, N)
    low, whole_low = tl.maximum(low, part * keys), tl.maximum(whole_low, part * keys)
    whole_high, high = tl.minimum(whole_high, part * keys + keys), tl.minimum(high, part * keys + keys)
    first_tile, whole_first, whole_last, wholes, rest = visible_tiles(
        low, whole_low, whole_high, tl.maximum(high, low), BLOCK_N
    )
    max_m = tl.full([BLOCK_M], LOWEST, tl.float32)
    sum_m = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for MASKED in tl.static_range(2):
        for step in tl.range(0, rest if MASKED else wholes, num_stages=1 if MASKED else None):
            start_n = tile_start(step, first_tile, whole_first, whole_last, BLOCK_N, MASKED)
            key = load_tile((key_ptr, start_n, row_n, key_strides, N), k, K, MASKED, CUT_K)
            j = start_n + row_n
            bias = bias_ptr
            if bias_ptr is not None:
                offsets = bias_rows[:, None] + j.to(tl.int64)[None, :] * bias_strides[3]
                shown = (i < M)[:, None] & (j < multiple(N, BIAS_STEP))[None, :]
                bias = tl.load(bias_ptr + offsets, mask=shown, other=0)
            scores = dot(query, key, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, True)
            z, _ = score_tile(
                scores, bias, j[None, :], first[:, None], end[:, None], scale, SOFTCAP, BASE_2, MASKED
            )
            new_max_m = tl.maximum(max_m, tl.max(z, 1))
            weight = weights(z, new_max_m[:, None], 0.0, BASE_2)
            fade_m = weights(max_m, new_max_m, 0.0, BASE_2)
            max_m = new_max_m
            sum_m = sum_m * fade_m + tl.sum(weight, 1)
            if row_key_ptr is not None:
                row = (b * H + h) * M + i
                keep = keep_mask(
                    row_key_ptr, column_key_ptr, row[:, None], j[None, :], (b + 1) * H * M, N, limit
                )
                weight = tl.where(keep, weight, 0.0)
            value = load_tile((value_ptr, start_n, row_n, value_strides, N), e, E, MASKED, CUT_E)
            out = dot(weight.to(value.dtype), value, out * fade_m[:, None], PRECISION, False)
    bh = b * H + h
    if part_ptr is None:
        store_result(
            out_ptr,
            low_ptr,
            statistics_ptr,
            out_strides,
            bh,
            H,
            i,
            M,
            e,
            E,
            out,
            max_m,
            sum_m,
            rescale,
            BASE_2,
        )
    else:
        rows = tl.num_programs(0) // parts * R * M
        row = bh.to(tl.int64) * M + i
        tl.store(
            part_ptr + (tl.cast(part, tl.int64) * rows + row)[:, None] * E + e[None, :], out,
            mask=(i < M)[:, None] & (e < E)[None, :],
        )  # fmt: skip
        part_sums_ptr += tl.cast(part, tl.int64) * (2 * rows)
        tl.store(part_sums_ptr + row, max_m, mask=i < M)
        tl.store(part_sums_ptr + rows + row, sum_m, mask=i < M)


@remember_launches
@triton.jit
def merge_parts_kernel(
    part_ptr, part_sums_ptr, out_ptr, low_ptr, statistics_ptr, out_strides, H, M, E, rows, parts, rescale,
    BASE_2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Write the result of some rows from the sums of all parts of the keys."""
    row, e = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    max_m = tl.full([BLOCK_M], LOWEST, tl.float32)
    sum_m = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for part in range(0, parts):
        start = tl.cast(part, tl.int64) * rows
        own_max_m = tl.load(part_sums_ptr + 2 * start + row, mask=row < rows, other=LOWEST)
        own_sum_m = tl.load(part_sums_ptr + 2 * start + rows + row, mask=row < rows, other=0.0)
        own_ptrs = part_ptr + (start + row)[:, None] * E + e[None, :]
        own = tl.load(own_ptrs, mask=(row < rows)[:, None] & (e < E)[None, :], other=0.0)
        new_max_m = tl.maximum(max_m, own_max_m)
        fade_m, own_fade_m = (
            weights(max_m, new_max_m, 0.0, BASE_2),
            weights(own_max_m, new_max_m, 0.0, BASE_2),
        )
        max_m = new_max_m
        sum_m = sum_m * fade_m + own_sum_m * own_fade_m
        out = out * fade_m[:, None] + own * own_fade_m[:, None]
    i = tl.where(row < rows, row % M, M)
    store_result(
        out_ptr,
        low_ptr,
        statistics_ptr,
        out_strides,
        row // M,
        H,
        i,
        M,
        e,
        E,
        out,
        max_m,
        sum_m,
        rescale,
        BASE_2,
    )
