"""Compute the gradients of attention in Triton from stored gradients of scores, strip by strip.

strips.py decides what is stored: the gradients of the scores and, with many features, the weights
too. `scores_kernel` then writes both. Otherwise recompute.key_value_gradient_kernel writes the
gradients. The other kernels of this file read what is stored, and recompute no score.

The layout is [heads, keys, queries], in which the queries of a key are contiguous and padded to a
multiple of 16. If a query does not see a key, their element may never have been written. Kernels
discard such an element after they have read it.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries
and keys, E of values; I rows of a matrix, F features of any operand. dq, dk and dv are the
gradients of query, key and value, dz is that of the softmax's input z.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.core.kernels.triton_helpers import slope_of_tanh
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    add_pieces,
    add_product,
    head,
    keep_mask,
    load_bias,
    load_pieces,
    load_rows,
    load_shift,
    load_tile,
    multiple,
    multiples,
    row_terms_at,
    score_gradient,
    score_tile,
    scores_at,
    store_scores,
    store_tile,
    weights,
)
from lowtide.ops.attention.triton_backend.kernels.visible import (
    interval,
    part_of,
    tile_start,
    visible_range,
    visible_tiles,
)

# Arguments that differ from strip to strip. Triton must not specialise a kernel on their values, or
# it would compile the kernel again.
OF_A_STRIP = ("first_group", "groups", "end_key", "tiles_m", "tiles_n")


@triton.jit
def load_scores(ptr, strides, n, i, start_n, first, end, MASKED: tl.constexpr):
    """Load the stored tile [keys, queries] of keys start_n + n and queries i.

    ptr points to the first of the tile's keys. MASKED: elements that the mask hides become 0.
    """
    ptrs = ptr + (n[:, None] * strides[1] + i[None, :])
    tile = tl.load(ptrs, mask=(i < strides[1])[None, :], other=0.0)
    if MASKED:
        j = (start_n + n)[:, None]
        tile = tl.where((j >= first[None, :]) & (j < end[None, :]), tile, 0.0)
    return tile


@triton.jit
def sum_over_features(
    a_place, b_place, F, tile, PRECISION: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Return tile + a b^T, loading one block of features at a time."""
    for block in range(0, BLOCKS):
        f = block * BLOCK + tl.arange(0, BLOCK)
        a = load_pieces(a_place, f, F, True, CUT, PIECES)
        b = load_pieces(b_place, f, F, True, CUT, PIECES)
        tile = add_pieces(a, b, tile, PRECISION, PIECES, True)
    return tile


@remember_launches
@triton.jit(do_not_specialize=OF_A_STRIP)
def scores_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    grad_output_ptr, row_terms_ptr, weight_ptr, grad_scores_ptr, grad_z_ptr, bias_sum_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides, grad_scores_strides,
    B, H, R, M, N, K, E, first_group, first_key, tiles_m, tiles_n, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write the weights and the gradients of scores of one tile, for one head of the strip.

    Operands in several PIECES hold the strip's heads only.

    bias_sum [heads of the strip, tiles_m, keys of the strip] receives the sums of dz over the
    queries of each tile. They add up to the gradient of a bias that is the same for all queries.
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides = multiples(value_strides, CUT_E)
    grad_output_strides = multiples(grad_output_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    tile_n, tile_m = tl.program_id(0) % tiles_n, tl.program_id(0) // tiles_n % tiles_m
    own = tl.program_id(0) // (tiles_n * tiles_m)
    start_m, start_n = tile_m * BLOCK_M, first_key + tile_n * BLOCK_N
    low, _low, _high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    if (start_n >= high) | (start_n + BLOCK_N <= low):
        return

    b, own_g, r = own // R % B, own // R // B, own % R
    h = (first_group + own_g) * R + r
    operand_g = own_g + (first_group if PIECES == 1 else 0)
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i, j = start_m + row_m, start_n + row_n
    query_ptr = head(query_ptr, query_strides, b, operand_g * R + r)
    grad_output_ptr = head(grad_output_ptr, grad_output_strides, b, operand_g * R + r)
    query_place = query_ptr, start_m, row_m, query_strides, M
    grad_output_place = grad_output_ptr, start_m, row_m, grad_output_strides, M
    key_place = head(key_ptr, key_strides, b, operand_g), start_n, row_n, key_strides, N
    value_place = head(value_ptr, value_strides, b, operand_g), start_n, row_n, value_strides, N
    head_bias_ptr = bias_ptr
    if bias_ptr is not None:
        head_bias_ptr = head(bias_ptr, bias_strides, b, h)
    row = (b * H + h).to(tl.int64) * M
    row_terms_ptr = row_terms_at(row_terms_ptr, b * H + h, M, BASE_2)

    bias = load_bias(head_bias_ptr, bias_strides, i[None, :], j[:, None], M, N, COLUMN_BIAS, BIAS_STEP)
    zero = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scores = sum_over_features(key_place, query_place, K, zero, PRECISION, PIECES, BLOCK_K, BLOCKS_K, CUT_K)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    z, room = score_tile(scores, bias, j[:, None], first[None, :], end[None, :], scale, SOFTCAP, BASE_2, True)
    shift_m, log2_sum_m = load_shift(row_terms_ptr, i, M, True, BASE_2)
    weight = weights(z, shift_m[None, :], log2_sum_m[None, :], BASE_2)
    sloped = weight
    if SOFTCAP > 0:
        sloped = weight * slope_of_tanh(room)
    used, keep = weight, True
    if row_key_ptr is not None:
        keep = keep_mask(row_key_ptr + row, column_key_ptr, i[None, :], j[:, None], M, N, limit)
        used = tl.where(keep, weight * rescale, 0.0)
    if weight_ptr is not None:
        ptr = scores_at(weight_ptr, grad_scores_strides, own, tile_n * BLOCK_N)
        store_scores(ptr, grad_scores_strides, row_n, i, used, True)
    if grad_scores_ptr is not None or grad_z_ptr is not None or bias_sum_ptr is not None:
        grad_weight = sum_over_features(
            value_place, grad_output_place, E, zero, PRECISION, PIECES, BLOCK_E, BLOCKS_E, CUT_E
        )
        delta = load_rows(row_terms_ptr, i, M, True)[None, :]
        if grad_z_ptr is not None or bias_sum_ptr is not None:
            grad = score_gradient(weight, grad_weight, delta, keep, rescale, row_key_ptr is not None)
            if bias_sum_ptr is not None:
                place = (own * tiles_m + tile_m).to(tl.int64) * (tiles_n * BLOCK_N) + tile_n * BLOCK_N
                tl.store(bias_sum_ptr + place + row_n, tl.sum(grad, 1))
            if grad_z_ptr is not None:
                ptr = scores_at(grad_z_ptr, grad_scores_strides, own, tile_n * BLOCK_N)
                store_scores(ptr, grad_scores_strides, row_n, i, grad, True)
        if grad_scores_ptr is not None:
            grad = score_gradient(sloped, grad_weight, delta, keep, rescale, row_key_ptr is not None)
            ptr = scores_at(grad_scores_ptr, grad_scores_strides, own, tile_n * BLOCK_N)
            store_scores(ptr, grad_scores_strides, row_n, i, grad, True)


@remember_launches
@triton.jit(do_not_specialize=OF_A_STRIP)
def query_of_scores_kernel(
    key_ptr, first_ptr, end_ptr, grad_scores_ptr, grad_query_ptr,
    key_strides, grad_scores_strides, grad_query_strides,
    B, R, M, N, K, first_group, groups, first_key, end_key, tiles_m, scale,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    CUT_K: tl.constexpr,
):  # fmt: skip
    """Write dq = scale grad_scores k, summed over a strip's keys, for one block of features.

    ADD: add to the previous values. grad_query holds the strip's heads only. So does the key if it
    is in several PIECES.
    """
    K, key_strides = multiple(K, CUT_K), multiples(key_strides, CUT_K)
    grad_query_strides = multiples(grad_query_strides, CUT_K)
    heads = groups * B * R
    program = tl.program_id(0)
    own = program // BLOCKS_K % heads
    # Begin with the last tile: under a causal mask it sees most keys.
    start_m = (tiles_m - 1 - program // (BLOCKS_K * heads)) * BLOCK_M
    b, g, r = own // R % B, own // R // B, own % R
    first_operand_g = first_group if PIECES == 1 else 0
    key_ptr = head(key_ptr, key_strides, b, first_operand_g + g)
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i, k = start_m + row_m, program % BLOCKS_K * BLOCK_K + tl.arange(0, BLOCK_K)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, whole_low, whole_high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    low, whole_low = tl.maximum(low, first_key), tl.maximum(whole_low, first_key)
    whole_high, high = tl.minimum(whole_high, end_key), tl.minimum(high, end_key)
    grad_query = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    first_tile, whole_first, whole_last, wholes, rest = visible_tiles(
        low, whole_low, whole_high, high, BLOCK_N
    )
    for MASKED in tl.static_range(2):
        for step in tl.range(0, rest if MASKED else wholes, num_stages=1 if MASKED else None):
            start_n = tile_start(step, first_tile, whole_first, whole_last, BLOCK_N, MASKED)
            ptr = scores_at(grad_scores_ptr, grad_scores_strides, own, start_n - first_key)
            grad = load_scores(ptr, grad_scores_strides, row_n, i, start_n, first, end, MASKED)
            key = load_pieces((key_ptr, start_n, row_n, key_strides, N), k, K, MASKED, CUT_K, PIECES)
            grad_query = add_product(tl.trans(grad), key, grad_query, PRECISION, PIECES)
    grad_query *= scale
    grad_query_ptr = head(grad_query_ptr, grad_query_strides, b, g * R + r)
    end_row = M
    if ADD:
        end_row = tl.where(low < high, M, 0)
        grad_query += load_tile(
            (grad_query_ptr, start_m, row_m, grad_query_strides, end_row), k, K, True, True
        )
    store_tile(grad_query_ptr, i, k, grad_query_strides, end_row, K, grad_query)


@triton.jit
def sum_over_queries(
    scores_ptr, x_ptr, out_ptr, first_ptr, end_ptr, row_first_ptr, row_end_ptr, scores_strides, x_strides,
    out_strides, own, B, b, g, operand_g, start_n, first_key, R, M, N, F, block, factor,
    PRECISION: tl.constexpr, PIECES: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Write the product of stored scores and x, times `factor`, for one key head.

    x is the query or grad_output. The product is summed over the queries of all query heads that
    share the key head. A program computes it for a tile of keys and one block of features.
    IN_PARTS: it takes a part of the queries (recompute.key_value_gradient_kernel).
    """
    if IN_PARTS:
        out_ptr += tl.program_id(2).to(tl.int64) * out_strides[4]
    F, x_strides, out_strides = multiple(F, CUT), multiples(x_strides, CUT), multiples(out_strides, CUT)
    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    f = block * BLOCK_F + tl.arange(0, BLOCK_F)
    low, whole_low, whole_high, high = visible_range(row_first_ptr, row_end_ptr, start_n, BLOCK_N, N, M)
    total = tl.zeros([BLOCK_N, BLOCK_F], tl.float32)
    first_tile, whole_first, whole_last, wholes, rest = visible_tiles(
        low, whole_low, whole_high, high, BLOCK_M
    )
    for r in range(0, R):
        own_ptr = scores_at(scores_ptr, scores_strides, own * R + r, start_n - first_key)
        own_x_ptr = head(x_ptr, x_strides, b, operand_g * R + r)
        for MASKED in tl.static_range(2):
            first_step, end_step = 0, rest if MASKED else wholes
            if IN_PARTS:
                first_step, end_step = part_of(end_step)
            for step in tl.range(first_step, end_step, num_stages=1 if MASKED else None):
                start_m = tile_start(step, first_tile, whole_first, whole_last, BLOCK_M, MASKED)
                i = start_m + row_m
                first, end = i, i
                if MASKED:
                    first, end = interval(first_ptr, end_ptr, i, M, N)
                part = load_scores(own_ptr, scores_strides, row_n, i, start_n, first, end, MASKED)
                x = load_pieces((own_x_ptr, start_m, row_m, x_strides, M), f, F, MASKED, CUT, PIECES)
                total = add_product(part, x, total, PRECISION, PIECES)
    if IN_PARTS:
        g, start_n, N = own // B, start_n - first_key, N - first_key
    out_ptr = head(out_ptr, out_strides, b, g)
    store_tile(out_ptr, start_n + row_n, f, out_strides, N, F, total * factor)


@remember_launches
@triton.jit(do_not_specialize=OF_A_STRIP)
def key_value_of_scores_kernel(
    query_ptr, grad_output_ptr, first_ptr, end_ptr, row_first_ptr, row_end_ptr, grad_scores_ptr, weight_ptr,
    grad_key_ptr, grad_value_ptr, query_strides, grad_output_strides, grad_scores_strides,
    grad_key_strides, grad_value_strides,
    B, R, M, N, K, E, first_group, groups, first_key, scale, PRECISION: tl.constexpr, PIECES: tl.constexpr,
    IN_PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCKS_K: tl.constexpr, BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr,
    CUT_E: tl.constexpr,
):  # fmt: skip
    """Write dk = scale grad_scores^T q and dv = weight^T grad_output, or one, for a strip's keys.

    A program writes one of the two, for one block of features.
    """
    BLOCKS: tl.constexpr = (BLOCKS_K if grad_key_ptr is not None else 0) + (
        BLOCKS_E if grad_value_ptr is not None else 0
    )
    program = tl.program_id(0)
    block, own = program % BLOCKS, program // BLOCKS % (groups * B)
    start_n = first_key + program // (BLOCKS * groups * B) * BLOCK_N
    b, g, operand_g = own % B, first_group + own // B, own // B
    if PIECES == 1:
        operand_g += first_group
    if grad_key_ptr is not None:
        if block < BLOCKS_K:
            sum_over_queries(
                grad_scores_ptr, query_ptr, grad_key_ptr, first_ptr, end_ptr, row_first_ptr, row_end_ptr,
                grad_scores_strides, query_strides, grad_key_strides, own, B, b, g, operand_g, start_n,
                first_key, R, M, N, K, block, scale, PRECISION, PIECES, IN_PARTS, BLOCK_M, BLOCK_N,
                BLOCK_K, CUT_K,
            )  # fmt: skip
        block -= BLOCKS_K
    if grad_value_ptr is not None and block >= 0:
        sum_over_queries(
            weight_ptr, grad_output_ptr, grad_value_ptr, first_ptr, end_ptr, row_first_ptr, row_end_ptr,
            grad_scores_strides, grad_output_strides, grad_value_strides, own, B, b, g, operand_g, start_n,
            first_key, R, M, N, E, block, 1.0, PRECISION, PIECES, IN_PARTS, BLOCK_M, BLOCK_N, BLOCK_E, CUT_E,
        )  # fmt: skip


@remember_launches
@triton.jit(do_not_specialize=OF_A_STRIP)
def bias_of_scores_kernel(
    first_ptr, end_ptr, grad_scores_ptr, grad_bias_ptr, grad_scores_strides, grad_bias_strides,
    B, R, M, N, own, loops, first_group, first_key, tile_counts,
    ADD_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write a tile of the bias's gradient: dz summed over all that share the bias.

    One program sums a tile, in a fixed order. own: how many batches and heads the bias itself has
    in the strip. loops: how many batches and heads share one batch and one head of the bias.
    tile_counts: the numbers of tiles of queries and of keys. ADD_BIAS: add to the previous values.
    """
    tile_n, tile_m = tl.program_id(0) % tile_counts[1], tl.program_id(0) // tile_counts[1] % tile_counts[0]
    place = tl.program_id(0) // (tile_counts[1] * tile_counts[0])
    own_b, own_h = place % own[0], place // own[0]
    start_m, start_n = tile_m * BLOCK_M, first_key + tile_n * BLOCK_N
    n, i = tl.arange(0, BLOCK_N), start_m + tl.arange(0, BLOCK_M)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, _low, _high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    steps = tl.where((start_n < high) & (start_n + BLOCK_N > low), loops[0] * loops[1], 0)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for step in range(0, steps):
        b, h = own_b + step % loops[0], own_h + step // loops[0]
        keep_head = (h // R * B + b) * R + h % R
        ptr = scores_at(grad_scores_ptr, grad_scores_strides, keep_head, start_n - first_key)
        total += load_scores(ptr, grad_scores_strides, n, i, start_n, first, end, False)
    j = start_n + n
    seen = (j[:, None] >= first[None, :]) & (j[:, None] < end[None, :])
    total = tl.trans(tl.where(seen, total, 0.0))
    grad_bias_ptr = head(grad_bias_ptr, grad_bias_strides, own_b, first_group * R + own_h)
    if ADD_BIAS:
        total += load_tile((grad_bias_ptr, start_m, i - start_m, grad_bias_strides, M), j, N, True, True)
    store_tile(grad_bias_ptr, i, j, grad_bias_strides, M, N, total)
