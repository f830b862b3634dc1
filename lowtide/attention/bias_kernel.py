"""The gradient of the bias in Triton: a third pass over the scores, on the bias's own tiles.

A program has one tile of the bias, and goes over the batches, heads and, of a bias that is the same for
all keys, tiles of keys; where these are many and the bias small, several programs share them, and write
partial sums. No atomics: memory is that of the bias, times the parts, and the order of all sums is fixed.
(The gradient of a bias that is the same for all queries falls off where keys and values get theirs.)
"""

import triton
import triton.language as tl

from lowtide.attention.backward_kernels import gradient_of_scores, load_shift, rows_of
from lowtide.attention.tile_kernels import (
    finished,
    head,
    interval,
    kept,
    load_rows,
    load_tile,
    product,
    seen_of_rows,
    weights,
)


@triton.jit
def bias_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    upstream_ptr, rows_ptr, part_ptr,
    query_strides, key_strides, value_strides, bias_strides, upstream_strides, part_strides,
    own_sizes, loop_sizes, parts, H, R, M, N, K, E, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    FULL_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """own_sizes: batches, heads, tiles of keys of the bias; loop_sizes: those it is broadcast over. Of each
    pair one is 1."""
    part, own = tl.program_id(0) % parts, tl.program_id(0) // parts
    own_n, own_h = own % own_sizes[2], own // own_sizes[2] % own_sizes[1]
    own_b = own // (own_sizes[2] * own_sizes[1]) % own_sizes[0]
    start_m = own // (own_sizes[2] * own_sizes[1] * own_sizes[0]) * BLOCK_M
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i, k, e = start_m + row_m, tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    steps = loop_sizes[0] * loop_sizes[1] * loop_sizes[2]
    if FULL_N and first_ptr is not None:
        low, _low, _high, high = seen_of_rows(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
        steps = tl.where((own_n * BLOCK_N < high) & (own_n * BLOCK_N + BLOCK_N > low), steps, 0)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(part, steps, parts):
        start_n = (own_n + step % loop_sizes[2]) * BLOCK_N
        h = own_h + step // loop_sizes[2] % loop_sizes[1]
        b = own_b + step // (loop_sizes[2] * loop_sizes[1])
        row = (b * H + h).to(tl.int64) * M
        j = start_n + row_n
        query_place = head(query_ptr, query_strides, b, h), start_m, row_m, query_strides, M
        upstream_place = head(upstream_ptr, upstream_strides, b, h), start_m, row_m, upstream_strides, M
        key_place = head(key_ptr, key_strides, b, h // R), start_n, row_n, key_strides, N
        value_place = head(value_ptr, value_strides, b, h // R), start_n, row_n, value_strides, N
        query, key = load_tile(query_place, k, K, True, CUT_K), load_tile(key_place, k, K, True, CUT_K)
        upstream = load_tile(upstream_place, e, E, True, CUT_E)
        value = load_tile(value_place, e, E, True, CUT_E)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = product(query, key, query_place, key_place, K, zero, PRECISION, BLOCKS_K, True, True, CUT_K)
        z, _ = finished(scores, i[:, None], j[None, :], first[:, None], end[:, None],
            head(bias_ptr, bias_strides, b, h), bias_strides, M, N, scale, SOFTCAP, BASE_2, False, True,
        )  # fmt: skip
        of_weight = product(
            upstream, value, upstream_place, value_place, E, zero, PRECISION, BLOCKS_E, True, True, CUT_E
        )
        stays = True
        if row_key_ptr is not None:
            stays = kept(row_key_ptr + row, column_key_ptr, i[:, None], j[None, :], M, N, limit)
        head_rows_ptr = rows_of(rows_ptr, b * H + h, M, BASE_2)
        shift_m, log2_sum_m = load_shift(head_rows_ptr, i, M, True, BASE_2)
        weight = weights(z, shift_m[:, None], log2_sum_m[:, None], BASE_2)
        delta = load_rows(head_rows_ptr, i, M, True)[:, None]
        total += gradient_of_scores(weight, of_weight, delta, stays, rescale, row_key_ptr is not None)

    j = own_n * BLOCK_N + row_n
    own_ptr = part_ptr + part.to(tl.int64) * part_strides[0]
    own_ptr += own_b.to(tl.int64) * part_strides[1] + own_h.to(tl.int64) * part_strides[2]
    i_offsets, j_offsets = i.to(tl.int64) * part_strides[3], j.to(tl.int64) * part_strides[4]
    if FULL_N:
        tl.store(
            own_ptr + i_offsets[:, None] + j_offsets[None, :],
            total.to(part_ptr.dtype.element_ty),
            (i < M)[:, None] & (j < N)[None, :],
        )
    else:
        tl.store(own_ptr + i_offsets, tl.sum(total, 1).to(part_ptr.dtype.element_ty), mask=i < M)
