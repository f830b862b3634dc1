"""Compute exponentials in Triton, by a GEMM whose epilogue stores E = exp(z - reference).

z are the logits, and each row has a reference near its largest logit. exponentials/engine.py has
the formulas. gemm.py launches this kernel, or that of gemm_gluon.py, which has the same epilogue.

A row tile is BLOCK_C rows of the chunk; a tile is BLOCK_B classes of a row tile. The epilogue runs
on one half of a tile's classes after the other. It stores partial results as matrices
[half tiles, C], which other kernels reduce to one number per row.

Shapes: C tokens of a chunk, D features, R features of a second, narrow term; B classes of a block,
or all; lower case = one tile, h half of its classes.
"""

import triton
import triton.language as tl

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math_triton import slope_of, transformed
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import LOG2_E, halves, tile_at

HUGE = tl.constexpr(1e38)
LOG_2 = tl.constexpr(0.6931471805599453)
# Replaces smaller exponents of 2, such as -inf where z is -inf. 2^-200 is 0 in float32, and 0 times
# -200 is 0, but 0 times -inf would be NaN.
LOWEST = tl.constexpr(-200.0)


@triton.jit
def product_of_tile(
    x_CD, weight_BD, x_CR, weight_BR, tile_c, tile_b, D,
    BLOCK_C: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return a tile of U, the product x weight^T of one term or the sum of those of two."""
    u_cb = tl.zeros((BLOCK_C, BLOCK_B), tl.float32)
    for start in range(0, D, BLOCK_D):
        x_cd = x_CD.load([tile_c * BLOCK_C, start])
        weight_bd = weight_BD.load([tile_b * BLOCK_B, start])
        u_cb = tl.dot(x_cd, weight_bd.T, u_cb)
    if x_CR is not None:
        x_cr, weight_br = x_CR.load([tile_c * BLOCK_C, 0]), weight_BR.load([tile_b * BLOCK_B, 0])
        u_cb = tl.dot(x_cr, weight_br.T, u_cb)
    return u_cb


@triton.jit
def _others(exp_ch, columns, target_c, B):
    """Return the exponentials, with 0 at the target and beyond the last class."""
    return tl.where((columns[None, :] < B) & (columns[None, :] != target_c[:, None]), exp_ch, 0.0)


@triton.jit
def epilogue(
    u_ch, rows, columns, first, part, reference_c, target_c, scale, C, B,
    bias_B_ptr, softmax_coef_C_ptr, entropy_coef_C_ptr, factor_C_ptr, sum_ptr, mean_ptr,
    grad_dot_logit_ptr, max_ptr, argmax_ptr,
    STORE: tl.constexpr, GUARDED: tl.constexpr, ADD: tl.constexpr, MASKED: tl.constexpr,
    RECOMPUTE: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Run the epilogue of a half tile: store its partial results, and return its part of E.

    `first` is the first class of the half tile, and `part` its number among the half tiles of a
    row. exponentials_kernel explains the pointers and options. If E is neither stored nor summed,
    E is not computed, and the result has no meaning.
    """
    H: tl.constexpr = u_ch.shape[1]
    exp_ch = u_ch
    if GUARDED:
        u_ch = tl.where(reference_c[:, None] < float("inf"), u_ch, 0.0)
    place = part.to(tl.int64) * C + rows
    beyond = first + H > B
    if bias_B_ptr is not None:
        u_ch += tl.load(bias_B_ptr + columns, mask=columns < B, other=0.0)[None, :]
    # The exact slope would spill registers. The inexact one is enough, as E is rounded to bfloat16.
    z_ch, bend_ch = transformed(u_ch, scale, SOFTCAP, False)
    if max_ptr is not None:
        z_ch = tl.where(columns[None, :] < B, z_ch, -float("inf"))
        max_c = tl.max(z_ch, 1)
        tl.store(max_ptr + place, max_c, mask=rows < C)
        if argmax_ptr is not None:
            # Find the first column of the maximum by arithmetic, which runs on twice as many lanes
            # as comparisons. (z - max) * HUGE - column is -column at the maximum, and far less
            # elsewhere.
            if RECOMPUTE:
                place_ch = tl.where(z_ch == max_c[:, None], columns[None, :], B - 1)
                argmax_c = tl.min(place_ch, 1)
            else:
                score_ch = tl.fma(z_ch - max_c[:, None], HUGE, -columns.to(tl.float32)[None, :])
                argmax_c = -tl.max(score_ch, 1).to(tl.int32)
            tl.store(argmax_ptr + place, argmax_c, mask=rows < C)
        if mean_ptr is not None:
            # Use the half tile's own maximum as reference. Differences from a distant reference
            # would lose their digits.
            reference_c = tl.where(max_c == -float("inf"), 0.0, max_c)
    if STORE or sum_ptr is not None:
        shift_ch = (z_ch - reference_c[:, None]) * LOG2_E
        exp_ch = tl.exp2(shift_ch)
        if mean_ptr is not None:  # beyond the last class z is -inf, so E is 0 there already
            exp_ch = tl.where(columns[None, :] != target_c[:, None], exp_ch, 0.0)
        elif MASKED:
            exp_ch = _others(exp_ch, columns, target_c, B)
        else:
            has_target_c = (target_c >= first) & (target_c < first + H)
            if beyond | (tl.max(has_target_c.to(tl.int32), 0) > 0):
                exp_ch = _others(exp_ch, columns, target_c, B)
        if sum_ptr is not None:
            sum_c = tl.sum(exp_ch, 1)
            if ADD:
                sum_c += tl.load(sum_ptr + place, mask=rows < C, other=0.0)
            tl.store(sum_ptr + place, sum_c, mask=rows < C)
        if entropy_coef_C_ptr is not None or mean_ptr is not None:
            shift_ch = tl.maximum(shift_ch, LOWEST) * LOG_2
        if mean_ptr is not None:
            tl.store(mean_ptr + place, tl.sum(exp_ch * shift_ch, 1), mask=rows < C)
        if entropy_coef_C_ptr is not None:
            softmax_coef_c = tl.load(softmax_coef_C_ptr + rows, mask=rows < C, other=0.0)
            entropy_coef_c = tl.load(entropy_coef_C_ptr + rows, mask=rows < C, other=0.0)
            exp_ch *= softmax_coef_c[:, None] + entropy_coef_c[:, None] * shift_ch
        if SOFTCAP > 0:
            exp_ch *= slope_of(bend_ch, SOFTCAP, False)
        if grad_dot_logit_ptr is not None:
            product_ch = tl.where(exp_ch == 0.0, 0.0, exp_ch * u_ch)
            grad_dot_logit_c = tl.sum(product_ch, 1)
            if ADD:
                grad_dot_logit_c += tl.load(grad_dot_logit_ptr + place, mask=rows < C, other=0.0)
            tl.store(grad_dot_logit_ptr + place, grad_dot_logit_c, mask=rows < C)
        if factor_C_ptr is not None:
            exp_ch *= tl.load(factor_C_ptr + rows, mask=rows < C, other=0.0)[:, None]
    return exp_ch


@remember_launches
@triton.jit
def exponentials_kernel(
    x_CD,
    weight_BD,
    x_CR,
    weight_BR,
    exp_CB,
    reference_C_ptr,
    target_C_ptr,
    bias_B_ptr,
    scale_ptr,
    softmax_coef_C_ptr,
    entropy_coef_C_ptr,
    factor_C_ptr,
    marks_ptr,
    sum_ptr,
    mean_ptr,
    grad_dot_logit_ptr,
    max_ptr,
    argmax_ptr,
    count_ptr,
    first_place,
    C,
    B,
    D,
    first_class,
    STORE: tl.constexpr,
    GUARDED: tl.constexpr,
    ADD: tl.constexpr,
    MASKED: tl.constexpr,
    RECOMPUTE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store E = exp(z - reference) in bfloat16 with 0 at the target, and partial sums in float32.

    Before E is stored, each element is multiplied by its own factor in the gradient (the soft cap's
    slope, the entropy's factor) and, with factor_C_ptr, by its row's factor. For each row and half
    tile, the kernel stores the results whose pointer is given:

        sum_ptr               the sum of E without these factors
        mean_ptr              the sum of E (z - reference), without these factors; needs max_ptr
        grad_dot_logit_ptr    the sum of E u, with the elements' factors but not the row's; u is
                              the product plus bias
        max_ptr, argmax_ptr   the largest z, and its class

    With mean_ptr, the reference is the half tile's largest z, for the sum too.

    ADD: add to the sums that earlier blocks of classes have stored. RECOMPUTE: compute only marked
    row tiles; marks_ptr[0] is 1 if any is marked, marks_ptr[1 + i] is not 0 if row tile i is.
    GUARDED: take the products of an ignored row, whose reference is infinite, as 0. Otherwise a NaN
    or inf product would make the row's sums NaN. MASKED: look for the target in every half tile,
    without a branch that skips half tiles without targets. Row tiles in which no row counts
    (counted_rows.py) are not computed.

    Grid: one program per multiprocessor, which takes tiles in turn.
    """
    tiles_c, tiles_b = tl.cdiv(counted_rows(count_ptr, first_place, C), BLOCK_C), tl.cdiv(B, BLOCK_B)
    scale = None
    if scale_ptr is not None:
        scale = tl.load(scale_ptr)
    tiles = tiles_c * tiles_b
    if RECOMPUTE:
        tiles *= tl.load(marks_ptr)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=not RECOMPUTE):
        tile_c, tile_b = tile_at(tile, tiles_c, tiles_b, GROUP)
        features = D
        if RECOMPUTE:
            features = tl.where(tl.load(marks_ptr + 1 + tile_c) != 0, D, 0)
        if not RECOMPUTE or features > 0:
            u_cb = product_of_tile(
                x_CD, weight_BD, x_CR, weight_BR, tile_c, tile_b, features, BLOCK_C, BLOCK_B, BLOCK_D
            )
            rows = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
            target_c = (tl.load(target_C_ptr + rows, mask=rows < C, other=0) - first_class).to(tl.int32)
            reference_c = tl.load(reference_C_ptr + rows, mask=rows < C, other=float("inf"))
            halves_ch = halves(u_cb)
            for half in tl.static_range(2):
                first = tile_b * BLOCK_B + half * (BLOCK_B // 2)
                exp_ch = epilogue(
                    halves_ch[half], rows, first + tl.arange(0, BLOCK_B // 2), first, 2 * tile_b + half,
                    reference_c, target_c, scale, C, B, bias_B_ptr, softmax_coef_C_ptr,
                    entropy_coef_C_ptr, factor_C_ptr,
                    sum_ptr, mean_ptr, grad_dot_logit_ptr, max_ptr, argmax_ptr,
                    STORE, GUARDED, ADD, MASKED, RECOMPUTE, SOFTCAP,
                )  # fmt: skip
                if STORE:
                    exp_CB.store([tile_c * BLOCK_C, first], exp_ch.to(exp_CB.dtype))
