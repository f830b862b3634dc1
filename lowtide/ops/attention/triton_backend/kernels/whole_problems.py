"""Compute the gradients of many short problems in Triton, each problem in one program.

A problem is one head of one batch. Its program computes each score once. It takes a tile of keys at
a time and sums their gradients, dk and dv, in registers. It adds to the queries' gradient, dq, in
memory that no other program writes to. So the order of all sums is fixed, and no scores are stored.

Shapes: B batches, H heads; M queries, N keys; K features of queries and keys, E of values.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.core.kernels.triton_helpers import slope_of_tanh
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    add_product,
    dot,
    head,
    keep_mask,
    load_bias,
    load_rows,
    load_shift,
    load_tile,
    multiples,
    row_terms_at,
    score_gradient,
    score_tile,
    store_tile,
    weights,
)
from lowtide.ops.attention.triton_backend.kernels.visible import interval, visible_range


@remember_launches
@triton.jit
def whole_problem_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    row_first_ptr, row_end_ptr, grad_output_ptr, row_terms_ptr, query_sum_ptr, grad_key_ptr, grad_value_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides, query_sum_strides,
    grad_key_strides, grad_value_strides,
    H, M, N, K, E, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr,
    CUT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write dk and dv of one problem, and add its dq to query_sum [B, H, M, K], float32.

    Tiles are transposed, [keys, queries]. CUT: a tile may reach beyond the queries or keys, or a
    mask may hide some of its scores.
    """
    bias_strides = multiples(bias_strides, BIAS_STEP)
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    query_ptr, key_ptr = head(query_ptr, query_strides, b, h), head(key_ptr, key_strides, b, h)
    value_ptr = head(value_ptr, value_strides, b, h)
    grad_output_ptr = head(grad_output_ptr, grad_output_strides, b, h)
    query_sum_ptr = head(query_sum_ptr, query_sum_strides, b, h)
    row_terms_ptr = row_terms_at(row_terms_ptr, b * H + h, M, BASE_2)
    if bias_ptr is not None:
        bias_ptr = head(bias_ptr, bias_strides, b, h)
    if row_key_ptr is not None:
        row_key_ptr += (b * H + h).to(tl.int64) * M
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    for tile_n in range(0, tl.cdiv(N, BLOCK_N)):
        start_n = tile_n * BLOCK_N
        j = start_n + row_n
        key = load_tile((key_ptr, start_n, row_n, key_strides, N), k, K, CUT, CUT_K)
        value = load_tile((value_ptr, start_n, row_n, value_strides, N), e, E, CUT, CUT_E)
        low, _low, _high, high = visible_range(row_first_ptr, row_end_ptr, start_n, BLOCK_N, N, M)
        grad_key = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        grad_value = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
        for tile_m in range(low // BLOCK_M, tl.cdiv(high, BLOCK_M)):
            start_m = tile_m * BLOCK_M
            i = start_m + row_m
            query = load_tile((query_ptr, start_m, row_m, query_strides, M), k, K, CUT, CUT_K)
            place = grad_output_ptr, start_m, row_m, grad_output_strides, M
            grad_output = load_tile(place, e, E, CUT, CUT_E)
            bias = load_bias(bias_ptr, bias_strides, i[None, :], j[:, None], M, N, COLUMN_BIAS, BIAS_STEP)
            zero = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            scores = dot(key, query, zero, PRECISION, True)
            grad_weight = dot(value, grad_output, zero, PRECISION, True)
            first, end = i, i
            if CUT:
                first, end = interval(first_ptr, end_ptr, i, M, N)
            z, room = score_tile(
                scores, bias, j[:, None], first[None, :], end[None, :], scale, SOFTCAP, BASE_2, CUT
            )
            shift_m, log2_sum_m = load_shift(row_terms_ptr, i, M, CUT, BASE_2)
            weight = weights(z, shift_m[None, :], log2_sum_m[None, :], BASE_2)
            used, keep = weight, CUT
            if row_key_ptr is not None:
                keep = keep_mask(row_key_ptr, column_key_ptr, i[None, :], j[:, None], M, N, limit)
                used = tl.where(keep, weight * rescale, 0.0)
            grad_value = add_product(used, grad_output, grad_value, PRECISION, 1)
            delta = load_rows(row_terms_ptr, i, M, CUT)[None, :]
            grad = score_gradient(weight, grad_weight, delta, keep, rescale, row_key_ptr is not None)
            if SOFTCAP > 0:
                grad *= slope_of_tanh(room)
            grad_key = add_product(grad, query, grad_key, PRECISION, 1)
            zero = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
            part = dot(tl.trans(grad.to(key.dtype)), key, zero, PRECISION, False) * scale
            part += load_tile((query_sum_ptr, start_m, row_m, query_sum_strides, M), k, K, True, True)
            store_tile(query_sum_ptr, i, k, query_sum_strides, M, K, part)
        if grad_key_ptr is not None:
            own_ptr = head(grad_key_ptr, grad_key_strides, b, h)
            store_tile(own_ptr, j, k, grad_key_strides, N, K, grad_key * scale)
        if grad_value_ptr is not None:
            own_ptr = head(grad_value_ptr, grad_value_strides, b, h)
            store_tile(own_ptr, j, e, grad_value_strides, N, E, grad_value)
        tl.debug_barrier()  # for the next keys, threads add to dq that other threads have written
