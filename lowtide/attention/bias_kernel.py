"""The gradient of the bias in Triton: a third pass over the scores, on the bias's own tiles.

A program has one tile of the bias, and goes over the batches, heads, tiles of queries and tiles of keys along
which the bias is broadcast; where these are many and the bias small, several programs share them, and write
partial sums. No atomics: memory is that of the bias, times the parts, and the order of all sums is fixed.
"""

import triton
import triton.language as tl

from lowtide.attention.backward_kernels import gradient_of_scores, rows_of, weights
from lowtide.attention.tile_kernels import finished, head, interval, kept, load_tile, product, seen_of_rows


@triton.jit
def bias_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    upstream_ptr, delta_ptr, logsumexp_ptr, part_ptr,
    query_strides, key_strides, value_strides, bias_strides, upstream_strides, part_strides,
    own_sizes, loop_sizes, parts, H, R, M, N, K, E, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, FULL_M: tl.constexpr, FULL_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr,
):  # fmt: skip
    """own_sizes: batches, heads, tiles of queries, tiles of keys of the bias; loop_sizes: those it is
    broadcast over. Of each pair one is 1."""
    part, own = tl.program_id(0) % parts, tl.program_id(0) // parts
    own_n, own_m = own % own_sizes[3], own // own_sizes[3] % own_sizes[2]
    own_h = own // (own_sizes[3] * own_sizes[2]) % own_sizes[1]
    own_b = own // (own_sizes[3] * own_sizes[2] * own_sizes[1])
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(part, loop_sizes[0] * loop_sizes[1] * loop_sizes[2] * loop_sizes[3], parts):
        start_n = (own_n + step % loop_sizes[3]) * BLOCK_N
        start_m = (own_m + step // loop_sizes[3] % loop_sizes[2]) * BLOCK_M
        h = own_h + step // (loop_sizes[3] * loop_sizes[2]) % loop_sizes[1]
        b = own_b + step // (loop_sizes[3] * loop_sizes[2] * loop_sizes[1])
        low, whole_low, whole_high, high = seen_of_rows(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
        if (start_n < high) & (start_n + BLOCK_N > low):
            row = (b * H + h).to(tl.int64) * M
            q_ptr, do_ptr = head(query_ptr, query_strides, b, h), head(upstream_ptr, upstream_strides, b, h)
            k_ptr, v_ptr = head(key_ptr, key_strides, b, h // R), head(value_ptr, value_strides, b, h // R)
            i, j = start_m + tl.arange(0, BLOCK_M), start_n + tl.arange(0, BLOCK_N)
            query = load_tile(q_ptr, i[:, None], k[None, :], query_strides, M, K)
            upstream = load_tile(do_ptr, i[:, None], e[None, :], upstream_strides, M, E)
            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = product(query, q_ptr, i, query_strides, M, k_ptr, j, key_strides, N,
                K, zero, PRECISION, BLOCK_K, BLOCKS_K)  # fmt: skip
            first, end = interval(first_ptr, end_ptr, i, M, N)
            inside = (start_n >= whole_low) & (start_n + BLOCK_N <= whole_high)
            z2, _ = finished(scores, i[:, None], j[None, :], first[:, None], end[:, None], inside,
                head(bias_ptr, bias_strides, b, h), bias_strides, M, N, scale, SOFTCAP)  # fmt: skip
            of_weight = product(upstream, do_ptr, i, upstream_strides, M, v_ptr, j, value_strides, N,
                E, zero, PRECISION, BLOCK_E, BLOCKS_E)  # fmt: skip
            stays = inside
            if row_key_ptr is not None:
                stays = kept(row_key_ptr + row, column_key_ptr, i[:, None], j[None, :], M, N, limit)
            weight = weights(z2, rows_of(logsumexp_ptr + row, i, M)[:, None])
            delta = rows_of(delta_ptr + row, i, M)[:, None]
            total += gradient_of_scores(weight, of_weight, delta, stays, rescale, row_key_ptr is not None)

    i, j = own_m * BLOCK_M + tl.arange(0, BLOCK_M), own_n * BLOCK_N + tl.arange(0, BLOCK_N)
    own_ptr = part_ptr + part.to(tl.int64) * part_strides[0]
    own_ptr += own_b.to(tl.int64) * part_strides[1] + own_h.to(tl.int64) * part_strides[2]
    i_offsets, j_offsets = i.to(tl.int64) * part_strides[3], j.to(tl.int64) * part_strides[4]
    if FULL_M and FULL_N:
        tl.store(
            own_ptr + i_offsets[:, None] + j_offsets[None, :], total, (i < M)[:, None] & (j < N)[None, :]
        )
    elif FULL_M:
        tl.store(own_ptr + i_offsets, tl.sum(total, 1), mask=i < M)
    elif FULL_N:
        tl.store(own_ptr + j_offsets, tl.sum(total, 0), mask=j < N)
    else:
        tl.store(own_ptr, tl.sum(tl.sum(total, 1), 0))
