"""Compute in Triton the gradient of a bias of short problems, from recomputed scores.

A problem is one head of one batch. A program takes one tile of the bias, and a run (several, one
after the other) of the problems that share it. It loads the bias once, and sums the gradients of
the tile's scores in registers. Tiles are transposed, [keys, queries]. So in float32 the products
are the same, bit for bit, as those of confident_delta_kernel.

Shapes: B batches; H query heads, R of them per key head; M queries, N keys; K features of queries
and keys, E of values. dz is the gradient of the softmax's input z.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    dot,
    head,
    keep_mask,
    load_bias,
    load_rows,
    load_shift,
    load_tile,
    multiple,
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
def short_bias_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    grad_output_ptr, row_terms_ptr, grad_bias_ptr, transposed_bias_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides, grad_bias_strides,
    transposed_bias_strides,
    batches, H, R, M, N, K, E, own_batches, own_heads, heads, steps, tiles_m, tiles_n, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr, CUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write a tile of grad_bias, the sum of dz over `steps` of the problems that share the bias.

    CUT: a tile may reach beyond the queries or keys, or a mask may hide some of its scores.
    own_batches, own_heads: the first two sizes of the bias. batches, heads: how many batches and
    how many heads of the call share one number of the bias. grad_bias has the shape
    [runs * own_batches, own_heads, M, N]; each run has its own sum. It is contiguous, so BIAS_STEP
    divides its strides as well. transposed_bias, if asked for, receives the bias as [keys, queries]
    (KernelCall.transposed_bias).
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides = multiples(value_strides, CUT_E)
    grad_output_strides = multiples(grad_output_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    grad_bias_strides = multiples(grad_bias_strides, BIAS_STEP)
    tile_n, tile_m = tl.program_id(0) % tiles_n, tl.program_id(0) // tiles_n % tiles_m
    own = tl.program_id(0) // (tiles_n * tiles_m)
    own_h, own_b, run = own % own_heads, own // own_heads % own_batches, own // (own_heads * own_batches)
    start, start_m, start_n = run * steps, tile_m * BLOCK_M, tile_n * BLOCK_N
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i, j = start_m + row_m, start_n + row_n
    k, e = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, _low, _high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    steps = tl.where(
        (start_n < high) & (start_n + BLOCK_N > low), tl.minimum(steps, batches * heads - start), 0
    )
    bias_ptr = head(bias_ptr, bias_strides, own_b, own_h)
    bias = load_bias(bias_ptr, bias_strides, i[None, :], j[:, None], M, N, COLUMN_BIAS, BIAS_STEP)
    if transposed_bias_ptr is not None:  # noqa: SIM102  Triton looks at both sides of an "and"
        if run == 0:
            transposed_bias_ptr = head(transposed_bias_ptr, transposed_bias_strides, own_b, own_h)
            store_tile(
                transposed_bias_ptr, j, i, transposed_bias_strides, N, transposed_bias_strides[2], bias
            )
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(0, steps):
        b, h = own_b + (start + step) // heads, own_h + (start + step) % heads
        query_place = head(query_ptr, query_strides, b, h), start_m, row_m, query_strides, M
        key_place = head(key_ptr, key_strides, b, h // R), start_n, row_n, key_strides, N
        value_place = head(value_ptr, value_strides, b, h // R), start_n, row_n, value_strides, N
        own_ptr = head(grad_output_ptr, grad_output_strides, b, h)
        grad_output_place = own_ptr, start_m, row_m, grad_output_strides, M
        query, key = load_tile(query_place, k, K, CUT, CUT_K), load_tile(key_place, k, K, CUT, CUT_K)
        value = load_tile(value_place, e, E, CUT, CUT_E)
        grad_output = load_tile(grad_output_place, e, E, CUT, CUT_E)
        own_terms_ptr = row_terms_at(row_terms_ptr, b * H + h, M, BASE_2)
        shift_m, log2_sum_m = load_shift(own_terms_ptr, i, M, CUT, BASE_2)
        delta_m = load_rows(own_terms_ptr, i, M, CUT)
        zero = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        scores = dot(key, query, zero, PRECISION, True)
        grad_weight = dot(value, grad_output, zero, PRECISION, True)
        z, _ = score_tile(scores, bias, j[:, None], first[None, :], end[None, :], scale, SOFTCAP, BASE_2, CUT)
        weight = weights(z, shift_m[None, :], log2_sum_m[None, :], BASE_2)
        keep = True
        if row_key_ptr is not None:
            row = (b * H + h).to(tl.int64) * M
            keep = keep_mask(row_key_ptr + row, column_key_ptr, i[None, :], j[:, None], M, N, limit)
        total += score_gradient(weight, grad_weight, delta_m[None, :], keep, rescale, row_key_ptr is not None)
    own_ptr = head(grad_bias_ptr, grad_bias_strides, run * own_batches + own_b, own_h)
    store_tile(own_ptr, i, j, grad_bias_strides, M, multiple(N, BIAS_STEP), tl.trans(total))
