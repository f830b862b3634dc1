"""Compute attention of many small problems in Triton, where one tile has all scores of a problem.

A problem is one head of one batch, such as a window of an image or a short sequence. A program
takes one head and a run of batches, one after the other. It loads a bias that all batches share
once, and sums the gradient of this bias over the run in registers.

Backward is one kernel. It computes the softmax again, so it reads neither the result nor the
statistics. It computes delta from the tile itself: delta_i = sum_j p_ij dp_ij - dlse_i, with the
weights p, their gradients dp and the upstream gradient dlse of the logsumexp.

Shapes: B batches, H heads; M queries, N keys; K features of queries and keys, E of values. dz is
the gradient of the softmax's input z.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.core.kernels.triton_helpers import slope_of_tanh
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    LOWEST,
    dot,
    head,
    keep_mask,
    load_bias,
    load_tile,
    multiple,
    multiples,
    score_tile,
    store_statistics,
    store_tile,
    weights,
)
from lowtide.ops.attention.triton_backend.kernels.visible import interval


@remember_launches
@triton.jit
def problem_forward_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    out_ptr, low_ptr, statistics_ptr,
    query_strides, key_strides, value_strides, bias_strides, out_strides,
    B, H, M, N, K, E, batches, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write the result of a run of `batches` problems and, if asked, its low half and statistics.

    SHARED: all batches share the bias, or there is none.
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides, out_strides = multiples(value_strides, CUT_E), multiples(out_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    h, start_b = tl.program_id(0) % H, tl.program_id(0) // H * batches
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    shared_bias_ptr = bias_ptr
    if bias_ptr is not None:
        shared_bias_ptr = bias_ptr + h.to(tl.int64) * bias_strides[1]
    bias = load_bias(shared_bias_ptr, bias_strides, i[:, None], j[None, :], M, N, COLUMN_BIAS, BIAS_STEP)
    for step in range(0, tl.minimum(batches, B - start_b)):
        b = start_b + step
        query = load_tile((head(query_ptr, query_strides, b, h), 0, i, query_strides, M), k, K, True, CUT_K)
        key = load_tile((head(key_ptr, key_strides, b, h), 0, j, key_strides, N), k, K, True, CUT_K)
        value = load_tile((head(value_ptr, value_strides, b, h), 0, j, value_strides, N), e, E, True, CUT_E)
        if not SHARED:
            own_bias_ptr = head(bias_ptr, bias_strides, b, h)
            bias = load_bias(own_bias_ptr, bias_strides, i[:, None], j[None, :], M, N, COLUMN_BIAS, BIAS_STEP)
        scores = dot(query, key, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, True)
        z, _ = score_tile(
            scores, bias, j[None, :], first[:, None], end[:, None], scale, SOFTCAP, BASE_2, True
        )
        max_m = tl.maximum(tl.max(z, 1), LOWEST)
        weight = weights(z, max_m[:, None], 0.0, BASE_2)
        sum_m = tl.sum(weight, 1)
        if row_key_ptr is not None:
            row = (b * H + h).to(tl.int64) * M
            keep = keep_mask(row_key_ptr + row, column_key_ptr, i[:, None], j[None, :], M, N, limit)
            weight = tl.where(keep, weight, 0.0)
        zero = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        out = dot(weight.to(value.dtype), value, zero, PRECISION, False)
        divisor_m = tl.where(sum_m == 0.0, 1.0, sum_m)  # 0: a row that sees no key, whose result is 0
        out *= (rescale / divisor_m)[:, None]
        rounded = out.to(out_ptr.dtype.element_ty)
        if low_ptr is not None:
            own_ptr = head(low_ptr, out_strides, b, h)
            store_tile(own_ptr, i, e, out_strides, M, E, out - rounded.to(tl.float32))
        store_tile(head(out_ptr, out_strides, b, h), i, e, out_strides, M, E, rounded)
        if statistics_ptr is not None:
            store_statistics(statistics_ptr, b * H + h, i, M, max_m, sum_m, BASE_2)


@remember_launches
@triton.jit
def problem_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    grad_output_ptr, grad_logsumexp_ptr, grad_query_ptr, grad_key_ptr, grad_value_ptr, grad_bias_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides, lse_strides,
    grad_query_strides, grad_key_strides, grad_value_strides, grad_bias_strides,
    B, H, M, N, K, E, batches, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write those gradients of a run of `batches` problems that have memory.

    SHARED: all batches share the bias, or there is none. Then grad_bias [runs, H, M, N] receives
    the sum of dz over each run. Otherwise grad_bias [B, H, M, N] receives dz. It is contiguous, so
    BIAS_STEP divides its strides as well.
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides = multiples(value_strides, CUT_E)
    grad_output_strides = multiples(grad_output_strides, CUT_E)
    grad_query_strides = multiples(grad_query_strides, CUT_K)
    grad_key_strides = multiples(grad_key_strides, CUT_K)
    grad_value_strides = multiples(grad_value_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    grad_bias_strides = multiples(grad_bias_strides, BIAS_STEP)
    h, run = tl.program_id(0) % H, tl.program_id(0) // H
    start_b = run * batches
    i, j = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    shared_bias_ptr = bias_ptr
    if bias_ptr is not None:
        shared_bias_ptr = bias_ptr + h.to(tl.int64) * bias_strides[1]
    bias = load_bias(shared_bias_ptr, bias_strides, i[:, None], j[None, :], M, N, COLUMN_BIAS, BIAS_STEP)
    grad_bias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for step in range(0, tl.minimum(batches, B - start_b)):
        b = start_b + step
        query = load_tile((head(query_ptr, query_strides, b, h), 0, i, query_strides, M), k, K, True, CUT_K)
        key = load_tile((head(key_ptr, key_strides, b, h), 0, j, key_strides, N), k, K, True, CUT_K)
        value = load_tile((head(value_ptr, value_strides, b, h), 0, j, value_strides, N), e, E, True, CUT_E)
        grad_output_place = head(grad_output_ptr, grad_output_strides, b, h), 0, i, grad_output_strides, M
        grad_output = load_tile(grad_output_place, e, E, True, CUT_E)
        if not SHARED:
            own_bias_ptr = head(bias_ptr, bias_strides, b, h)
            bias = load_bias(own_bias_ptr, bias_strides, i[:, None], j[None, :], M, N, COLUMN_BIAS, BIAS_STEP)
        zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        scores = dot(query, key, zero, PRECISION, True)
        grad_weight = dot(grad_output, value, zero, PRECISION, True)
        z, room = score_tile(
            scores, bias, j[None, :], first[:, None], end[:, None], scale, SOFTCAP, BASE_2, True
        )
        weight = weights(z, tl.maximum(tl.max(z, 1), LOWEST)[:, None], 0.0, BASE_2)
        sum_m = tl.sum(weight, 1)
        weight *= (1.0 / tl.where(sum_m == 0.0, 1.0, sum_m))[:, None]
        used = weight
        if row_key_ptr is not None:
            row = (b * H + h).to(tl.int64) * M
            keep = keep_mask(row_key_ptr + row, column_key_ptr, i[:, None], j[None, :], M, N, limit)
            used = tl.where(keep, weight * rescale, 0.0)
            grad_weight = tl.where(keep, grad_weight * rescale, 0.0)
        if grad_value_ptr is not None:
            used = tl.trans(used.to(grad_output.dtype))
            zero = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
            grad_value = dot(used, grad_output, zero, PRECISION, False)
            own_ptr = head(grad_value_ptr, grad_value_strides, b, h)
            store_tile(own_ptr, j, e, grad_value_strides, N, E, grad_value)
        delta_m = tl.sum(weight * grad_weight, 1)
        if grad_logsumexp_ptr is not None:
            dlse_ptr = head(grad_logsumexp_ptr, lse_strides, b, h)
            delta_m -= tl.load(dlse_ptr + i.to(tl.int64) * lse_strides[2], mask=i < M, other=0.0)
        grad = weight * (grad_weight - delta_m[:, None])
        if SHARED:
            grad_bias += grad
        elif grad_bias_ptr is not None:
            own_ptr = head(grad_bias_ptr, grad_bias_strides, b, h)
            store_tile(own_ptr, i, j, grad_bias_strides, M, multiple(N, BIAS_STEP), grad)
        if SOFTCAP > 0:
            grad *= slope_of_tanh(room)
        grad = grad.to(query.dtype)
        if grad_query_ptr is not None:
            grad_query = dot(grad, key, tl.zeros([BLOCK_M, BLOCK_K], tl.float32), PRECISION, False)
            own_ptr = head(grad_query_ptr, grad_query_strides, b, h)
            store_tile(own_ptr, i, k, grad_query_strides, M, K, grad_query * scale)
        if grad_key_ptr is not None:
            zero = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
            grad_key = dot(tl.trans(grad), query, zero, PRECISION, False)
            own_ptr = head(grad_key_ptr, grad_key_strides, b, h)
            store_tile(own_ptr, j, k, grad_key_strides, N, K, grad_key * scale)
    if SHARED and grad_bias_ptr is not None:
        own_ptr = head(grad_bias_ptr, grad_bias_strides, run, h)
        store_tile(own_ptr, i, j, grad_bias_strides, M, multiple(N, BIAS_STEP), grad_bias)
