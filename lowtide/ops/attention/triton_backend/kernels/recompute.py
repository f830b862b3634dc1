"""Compute the gradients of attention in Triton from recomputed scores.

torch_backend/backward.py has the formulas, and the meaning of do, dlse, delta and dz. One kernel
computes dq, the queries' gradient. Another computes dk and dv, those of keys and values. So one
program sums each number of a gradient, in a fixed order and without atomics, but each kernel
computes the scores again. A program writes one block of features of a gradient (tile_sizes.py has
the sizes). Whichever block it writes, its scores are summed over all features.

Shapes: B batches; H query heads, R of them per key head; M queries, N keys; K features of queries
and keys, E of values.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.core.kernels.triton_helpers import slope_of_tanh
from lowtide.ops.attention.triton_backend.kernels.tiles import (
    LOG2E,
    add_product,
    dot,
    head,
    keep_mask,
    load_bias,
    load_pieces,
    load_rows,
    load_shift,
    load_tile,
    multiple,
    multiples,
    product,
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
    shown_range,
    tile_start,
    tiles_if_shown,
    visible_range,
    visible_tiles,
)


@remember_launches
@triton.jit
def delta_kernel(
    out_ptr, low_ptr, grad_output_ptr, grad_logsumexp_ptr, statistics_ptr, row_terms_ptr,
    out_strides, low_strides, grad_output_strides, lse_strides, H, M, E, tiles,
    BASE_2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write row_terms [B, H, 2 or 3, M]: the numbers of each row that the tiles of backward read.

    They are delta = rowsum(o do) - dlse, the shift of tiles.weights and, in natural units, its
    log2_sum. This kernel computes them once, instead of once in each tile. A row that sees no key
    has the logarithm -inf, which becomes 0: all its scores are -inf, so its weights are 0 anyway.
    In half precision the result o may have a low half, which is added (operands.allocate_low).
    """
    E, grad_output_strides = multiple(E, CUT_E), multiples(grad_output_strides, CUT_E)
    out_strides, low_strides = multiples(out_strides, CUT_E), multiples(low_strides, CUT_E)
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    b, h = bh // H, bh % H
    start_m, row_m = tile * BLOCK_M, tl.arange(0, BLOCK_M)
    i = start_m + row_m
    out_ptr = head(out_ptr, out_strides, b, h)
    own_low_ptr = low_ptr
    if low_ptr is not None:
        own_low_ptr = head(low_ptr, low_strides, b, h)
    grad_output_ptr = head(grad_output_ptr, grad_output_strides, b, h)
    delta_m = tl.zeros([BLOCK_M], tl.float32)
    if grad_logsumexp_ptr is not None:
        dlse_ptr = head(grad_logsumexp_ptr, lse_strides, b, h)
        delta_m -= tl.load(dlse_ptr + i.to(tl.int64) * lse_strides[2], mask=i < M, other=0.0)
    for start_e in range(0, E, BLOCK_E):
        e = start_e + tl.arange(0, BLOCK_E)
        out = load_tile((out_ptr, start_m, row_m, out_strides, M), e, E, True, CUT_E).to(tl.float32)
        if low_ptr is not None:
            out += load_tile((own_low_ptr, start_m, row_m, low_strides, M), e, E, True, CUT_E).to(tl.float32)
        grad_output = load_tile((grad_output_ptr, start_m, row_m, grad_output_strides, M), e, E, True, CUT_E)
        delta_m += tl.sum(out * grad_output.to(tl.float32), 1)
    row_terms_ptr = row_terms_at(row_terms_ptr, bh, M, BASE_2) + i
    tl.store(row_terms_ptr, delta_m, mask=i < M)
    statistics_ptr += bh.to(tl.int64) * (2 * M) + i
    max_m = tl.load(statistics_ptr, mask=i < M, other=0.0)
    log_sum_m = tl.load(statistics_ptr + M, mask=i < M, other=0.0)
    log2_sum_m = tl.where(log_sum_m == -float("inf"), 0.0, log_sum_m) * LOG2E
    if BASE_2:
        max_m = tl.where(log_sum_m == -float("inf"), 0.0, max_m * LOG2E) + log2_sum_m
    else:
        tl.store(row_terms_ptr + 2 * M, log2_sum_m, mask=i < M)
    tl.store(row_terms_ptr + M, max_m, mask=i < M)


@remember_launches
@triton.jit
def query_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    grad_output_ptr, row_terms_ptr, grad_query_ptr, grad_bias_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides, grad_query_strides,
    grad_bias_strides,
    H, R, M, N, K, E, tiles, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write a tile of dq, for one block of features.

    grad_bias [B, H, M, N] receives dz, the gradient of a bias that neither batches nor heads share.
    It is contiguous, so BIAS_STEP divides its strides as well.
    Tiles of keys that no query of the tile sees may be left unwritten: there dz is 0.
    """
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides = multiples(value_strides, CUT_E)
    grad_output_strides = multiples(grad_output_strides, CUT_E)
    grad_query_strides = multiples(grad_query_strides, CUT_K)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    grad_bias_strides = multiples(grad_bias_strides, BIAS_STEP)
    tile, bh = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    start_m = (tiles - 1 - tile) * BLOCK_M
    b, h, row = bh // H, bh % H, bh.to(tl.int64) * M
    query_ptr = head(query_ptr, query_strides, b, h)
    grad_output_ptr = head(grad_output_ptr, grad_output_strides, b, h)
    key_ptr, value_ptr = head(key_ptr, key_strides, b, h // R), head(value_ptr, value_strides, b, h // R)
    if bias_ptr is not None:
        bias_ptr = head(bias_ptr, bias_strides, b, h)
    if row_key_ptr is not None:
        row_key_ptr += row

    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    i, k, e = start_m + row_m, tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    own_k = tl.program_id(1) * BLOCK_K + k
    query_place = query_ptr, start_m, row_m, query_strides, M
    grad_output_place = grad_output_ptr, start_m, row_m, grad_output_strides, M
    query = load_tile(query_place, k, K, True, CUT_K)
    grad_output = load_tile(grad_output_place, e, E, True, CUT_E)
    row_terms_ptr = row_terms_at(row_terms_ptr, bh, M, BASE_2)
    delta = load_rows(row_terms_ptr, i, M, True)[:, None]
    shift_m, log2_sum_m = load_shift(row_terms_ptr, i, M, True, BASE_2)
    first, end = interval(first_ptr, end_ptr, i, M, N)
    low, whole_low, whole_high, high = visible_range(first_ptr, end_ptr, start_m, BLOCK_M, M, N)
    low, whole_low, whole_high, high = shown_range(
        bias_ptr, bias_strides, low, whole_low, whole_high, high, N, COLUMN_BIAS, BLOCK_N
    )
    grad_query = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    first_tile, whole_first, whole_last, wholes, rest = visible_tiles(
        low, whole_low, whole_high, high, BLOCK_N
    )
    for MASKED in tl.static_range(2):
        for step in tl.range(0, rest if MASKED else wholes, num_stages=1 if MASKED else None):
            start_n = tile_start(step, first_tile, whole_first, whole_last, BLOCK_N, MASKED)
            key_place = key_ptr, start_n, row_n, key_strides, N
            value_place = value_ptr, start_n, row_n, value_strides, N
            key = load_tile(key_place, k, K, MASKED, CUT_K)
            value = load_tile(value_place, e, E, MASKED, CUT_E)
            j = start_n + row_n
            bias = load_bias(bias_ptr, bias_strides, i[:, None], j[None, :], M, N, COLUMN_BIAS, BIAS_STEP)
            zero = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            scores = product(
                query, key, query_place, key_place, K, zero, PRECISION, BLOCKS_K, True, MASKED, CUT_K
            )
            z, room = score_tile(
                scores, bias, j[None, :], first[:, None], end[:, None], scale, SOFTCAP, BASE_2, MASKED
            )
            grad_weight = product(
                grad_output, value, grad_output_place, value_place, E, zero, PRECISION, BLOCKS_E,
                True, MASKED, CUT_E,
            )  # fmt: skip
            keep = MASKED
            if row_key_ptr is not None:
                keep = keep_mask(row_key_ptr, column_key_ptr, i[:, None], j[None, :], M, N, limit)
            weight = weights(z, shift_m[:, None], log2_sum_m[:, None], BASE_2)
            grad = score_gradient(weight, grad_weight, delta, keep, rescale, row_key_ptr is not None)
            if grad_bias_ptr is not None and tl.program_id(1) == 0:
                own_ptr = head(grad_bias_ptr, grad_bias_strides, b, h)
                store_tile(own_ptr, i, j, grad_bias_strides, M, multiple(N, BIAS_STEP), grad)
            if grad_query_ptr is not None:
                if SOFTCAP > 0:
                    grad *= slope_of_tanh(room)
                if BLOCKS_K > 1:
                    key = load_tile(key_place, own_k, K, MASKED, CUT_K)
                grad_query = dot(grad.to(key.dtype), key, grad_query, PRECISION, False)
    if grad_query_ptr is not None:
        own_ptr = head(grad_query_ptr, grad_query_strides, b, h)
        store_tile(own_ptr, i, own_k, grad_query_strides, M, K, grad_query * scale)


@remember_launches
@triton.jit(do_not_specialize=["first_group"])
def key_value_gradient_kernel(
    query_ptr, key_ptr, value_ptr, bias_ptr, first_ptr, end_ptr, row_key_ptr, column_key_ptr,
    row_first_ptr, row_end_ptr, grad_output_ptr, row_terms_ptr, grad_key_ptr, grad_value_ptr,
    bias_sum_ptr, grad_scores_ptr, grad_z_ptr,
    query_strides, key_strides, value_strides, bias_strides, grad_output_strides,
    grad_key_strides, grad_value_strides, grad_scores_strides,
    B, H, R, M, N, K, E, first_group, first_key, tiles, scale, limit, rescale,
    SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, BASE_2: tl.constexpr, COLUMN_BIAS: tl.constexpr,
    BIAS_STEP: tl.constexpr, BIAS_TRANSPOSED: tl.constexpr, PIECES: tl.constexpr, IN_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCKS_K: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCKS_E: tl.constexpr, CUT_K: tl.constexpr, CUT_E: tl.constexpr,
):  # fmt: skip
    """Write a tile of dk, of dv, or of both, and store the gradients of a strip's scores.

    Tiles are transposed, [keys, queries]. Query i sees key j if row_first[j] <= i < row_end[j].

    bias_sum [B, H, N] receives the sums of dz over the queries, for a bias that is the same for all
    queries. For a strip (strips.py), grad_z receives dz, and grad_scores dz multiplied by the soft
    cap's slope. BIAS_TRANSPOSED: the bias is KernelCall.transposed_bias, [keys, queries]. PIECES is
    the number of pieces of query, key, value and grad_output (bf16_split.py). With several pieces,
    these operands hold the strip's heads only.

    IN_PARTS: each of the programs of a tile takes a part of the queries. Then grad_key, grad_value
    and bias_sum have one more dimension, that of the parts, and grad_key and grad_value hold the
    strip's heads and keys only.
    """
    if IN_PARTS:
        part = tl.program_id(2).to(tl.int64)
        if grad_key_ptr is not None:
            grad_key_ptr += part * grad_key_strides[4]
        if grad_value_ptr is not None:
            grad_value_ptr += part * grad_value_strides[4]
        if bias_sum_ptr is not None:
            bias_sum_ptr += part * B * H * N
    K, E = multiple(K, CUT_K), multiple(E, CUT_E)
    query_strides, key_strides = multiples(query_strides, CUT_K), multiples(key_strides, CUT_K)
    value_strides = multiples(value_strides, CUT_E)
    grad_output_strides = multiples(grad_output_strides, CUT_E)
    grad_key_strides = multiples(grad_key_strides, CUT_K)
    grad_value_strides = multiples(grad_value_strides, CUT_E)
    bias_strides = multiples(bias_strides, BIAS_STEP)
    STORES: tl.constexpr = grad_scores_ptr is not None or grad_z_ptr is not None
    unit = tl.program_id(0) // tiles
    start_n = first_key + tl.program_id(0) % tiles * BLOCK_N
    b, g = unit % B, first_group + unit // B
    operand_g = unit // B  # the key head's index in operands that hold only the strip's heads
    if PIECES == 1:
        operand_g = g
    key_ptr = head(key_ptr, key_strides, b, operand_g)
    value_ptr = head(value_ptr, value_strides, b, operand_g)

    row_m, row_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    j, k, e = start_n + row_n, tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_E)
    own_k, own_e = tl.program_id(1) * BLOCK_K + k, tl.program_id(1) * BLOCK_E + e
    key_place = key_ptr, start_n, row_n, key_strides, N
    value_place = value_ptr, start_n, row_n, value_strides, N
    key = load_pieces(key_place, k, K, True, CUT_K, PIECES)
    value = load_pieces(value_place, e, E, True, CUT_E, PIECES)
    low, whole_low, whole_high, high = visible_range(row_first_ptr, row_end_ptr, start_n, BLOCK_N, N, M)
    grad_key = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    grad_value = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    for r in range(0, R):
        h = g * R + r
        row = (b * H + h).to(tl.int64) * M
        q_ptr = head(query_ptr, query_strides, b, operand_g * R + r)
        do_ptr = head(grad_output_ptr, grad_output_strides, b, operand_g * R + r)
        head_bias_ptr, head_row_key_ptr = bias_ptr, row_key_ptr
        head_terms_ptr = row_terms_at(row_terms_ptr, b * H + h, M, BASE_2)
        if bias_ptr is not None:
            head_bias_ptr = head(bias_ptr, bias_strides, b, h)
        if row_key_ptr is not None:
            head_row_key_ptr = row_key_ptr + row
        bias_sum_n = tl.zeros([BLOCK_N], tl.float32)
        first_tile, whole_first, whole_last, wholes, rest = visible_tiles(
            low, whole_low, whole_high, high, BLOCK_M
        )
        if not STORES:  # other kernels read the stored tiles of all keys in the intervals
            wholes, rest = tiles_if_shown(head_bias_ptr, bias_strides, j, N, wholes, rest, COLUMN_BIAS)
        for MASKED in tl.static_range(2):
            first_step, end_step = 0, rest if MASKED else wholes
            if IN_PARTS:
                first_step, end_step = part_of(end_step)
            for step in tl.range(first_step, end_step, num_stages=1 if MASKED else None):
                start_m = tile_start(step, first_tile, whole_first, whole_last, BLOCK_M, MASKED)
                query_place = q_ptr, start_m, row_m, query_strides, M
                grad_output_place = do_ptr, start_m, row_m, grad_output_strides, M
                query = load_pieces(query_place, k, K, MASKED, CUT_K, PIECES)
                grad_output = load_pieces(grad_output_place, e, E, MASKED, CUT_E, PIECES)
                i = start_m + row_m
                if BIAS_TRANSPOSED:
                    bias = load_bias(
                        head_bias_ptr, bias_strides, j[:, None], i[None, :], N, bias_strides[2], False,
                        BIAS_STEP,
                    )  # fmt: skip
                else:
                    bias = load_bias(
                        head_bias_ptr, bias_strides, i[None, :], j[:, None], M, N, COLUMN_BIAS, BIAS_STEP
                    )
                zero = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                scores = product(
                    key, query, key_place, query_place, K, zero, PRECISION, BLOCKS_K,
                    True, MASKED, CUT_K, PIECES,
                )  # fmt: skip
                grad_weight = product(
                    value, grad_output, value_place, grad_output_place, E, zero, PRECISION, BLOCKS_E,
                    True, MASKED, CUT_E, PIECES,
                )  # fmt: skip
                first, end = i, i
                if MASKED:
                    first, end = interval(first_ptr, end_ptr, i, M, N)
                z, room = score_tile(
                    scores, bias, j[:, None], first[None, :], end[None, :], scale, SOFTCAP, BASE_2, MASKED
                )
                shift_m, log2_sum_m = load_shift(head_terms_ptr, i, M, MASKED, BASE_2)
                weight = weights(z, shift_m[None, :], log2_sum_m[None, :], BASE_2)
                used, keep = weight, MASKED
                if row_key_ptr is not None:
                    keep = keep_mask(head_row_key_ptr, column_key_ptr, i[None, :], j[:, None], M, N, limit)
                    used = tl.where(keep, weight * rescale, 0.0)
                if grad_value_ptr is not None:
                    own = grad_output
                    if BLOCKS_E > 1 or BLOCKS_K > 1:
                        own = load_pieces(grad_output_place, own_e, E, MASKED, True, PIECES)
                    grad_value = add_product(used, own, grad_value, PRECISION, PIECES)
                if STORES or grad_key_ptr is not None or bias_sum_ptr is not None:
                    delta = load_rows(head_terms_ptr, i, M, MASKED)[None, :]
                    grad = score_gradient(weight, grad_weight, delta, keep, rescale, row_key_ptr is not None)
                    if bias_sum_ptr is not None:
                        bias_sum_n += tl.sum(grad, 1)
                    if grad_z_ptr is not None and tl.program_id(1) == 0:
                        ptr = scores_at(grad_z_ptr, grad_scores_strides, unit * R + r, start_n - first_key)
                        store_scores(ptr, grad_scores_strides, row_n, i, grad, MASKED)
                    sloped = grad
                    if SOFTCAP > 0:
                        sloped = grad * slope_of_tanh(room)
                    if grad_scores_ptr is not None and tl.program_id(1) == 0:
                        ptr = scores_at(
                            grad_scores_ptr, grad_scores_strides, unit * R + r, start_n - first_key
                        )
                        store_scores(ptr, grad_scores_strides, row_n, i, sloped, MASKED)
                if grad_key_ptr is not None:
                    own = query
                    if BLOCKS_E > 1 or BLOCKS_K > 1:
                        own = load_pieces(query_place, own_k, K, MASKED, True, PIECES)
                    grad_key = add_product(sloped, own, grad_key, PRECISION, PIECES)
        if bias_sum_ptr is not None and tl.program_id(1) == 0:
            tl.store(bias_sum_ptr + (b * H + h).to(tl.int64) * N + j, bias_sum_n, mask=j < N)
    if IN_PARTS:
        g, j, N = unit // B, j - first_key, N - first_key
    if grad_key_ptr is not None:
        own_ptr = head(grad_key_ptr, grad_key_strides, b, g)
        store_tile(own_ptr, j, own_k, grad_key_strides, N, K, grad_key * scale)
    if grad_value_ptr is not None:
        own_ptr = head(grad_value_ptr, grad_value_strides, b, g)
        store_tile(own_ptr, j, own_e, grad_value_strides, N, E, grad_value)
