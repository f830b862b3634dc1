"""Hold a float32 sum in 24 or 20 bits, and add GEMMs to it in Triton.

The upper 16 bits of each number lie where the bfloat16 gradient will be. The next 8 or 4 bits lie
in a separate tensor. Each addition rounds the sum by at most 2^-16 (24 bits) or 2^-12 (20 bits) of
itself; bfloat16 alone would round by 2^-8. The sum is rounded to the gradient once, at the end
(decisions 0013 and 0036).

Two neighbouring features form a pair. The upper bits of a pair are an int32 number, pair_VP; its
lower bits are a number of 16 or 8 bits, low_VP, whose dtype tells the format.

smoothing_row is the sum over rows of smoothing_coef x. Label smoothing subtracts from each class
its class weight times this row.

Shapes: C tokens of a chunk, D features, P pairs of features, V classes; lower case = one tile, h
the pairs of half its features.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe, halves, multiprocessors, tile_at

BLOCK_V, BLOCK_D, BLOCK_C = 128, 256, 64
WARPS = 8
GROUP = 8  # class tiles that read a tile of a chunk's features while it is in the L2 cache


UPPER = tl.constexpr(-65536)  # the upper 16 of 32 bits


@triton.jit
def from_pairs(pair, low):
    """Return the sums of even and of odd features, unpacked from pairs and their lower bits."""
    bits = low.to(tl.int32)
    if low.dtype == tl.uint16:
        even, odd = (pair << 16) | ((bits & 0xFF) << 8), (pair & UPPER) | (bits & 0xFF00)
    else:
        even, odd = (pair << 16) | ((bits & 15) << 12), (pair & UPPER) | ((bits & 0xF0) << 8)
    return even.to(tl.float32, bitcast=True), odd.to(tl.float32, bitcast=True)


@triton.jit
def load_pairs(pair_ptr, low_ptr, mask):
    """Return the sums of even and of odd features, loaded from memory."""
    return from_pairs(tl.load(pair_ptr, mask=mask, other=0), tl.load(low_ptr, mask=mask, other=0))


@triton.jit
def _nearest(value, HALF: tl.constexpr):
    """Return the bits plus HALF, so that cutting off the lower bits rounds to nearest."""
    bits = value.to(tl.int32, bitcast=True)
    # NaN is left as it is, since HALF added to a NaN of all ones would give about 0.
    return tl.where(value == value, bits + HALF, bits)


@triton.jit
def to_pairs(even, odd, low_type: tl.constexpr):
    """Return the pair's upper bits, and its lower bits as a number of type `low_type`."""
    if low_type == tl.uint16:
        even, odd = _nearest(even, 0x80), _nearest(odd, 0x80)
        low = ((even >> 8) & 0xFF) | (odd & 0xFF00)
    else:
        even, odd = _nearest(even, 0x800), _nearest(odd, 0x800)
        low = ((even >> 12) & 15) | ((odd >> 8) & 0xF0)
    return ((even >> 16) & 0xFFFF) | (odd & UPPER), low.to(low_type)


@triton.jit
def store_pairs(pair_ptr, low_ptr, even, odd, mask):
    """Pack and store the sums of even and of odd features."""
    pair, low = to_pairs(even, odd, low_ptr.dtype.element_ty)
    tl.store(pair_ptr, pair, mask=mask)
    tl.store(low_ptr, low, mask=mask)


@triton.jit
def rounded_pairs(even, odd, factor):
    """Return pairs of bfloat16: factor times the sums of even and of odd features."""
    even = (even * factor).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    odd = (odd * factor).to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32)
    return (even & 0xFFFF) | (odd << 16)


@triton.jit
def _load_smoothing_row(smoothing_row_D_ptr, pair, mask):
    """Return the smoothing row at even and at odd features."""
    even = tl.load(smoothing_row_D_ptr + 2 * pair, mask=mask, other=0.0)
    return even, tl.load(smoothing_row_D_ptr + 2 * pair + 1, mask=mask, other=0.0)


@triton.jit
def less_smoothing(even_vh, odd_vh, class_weight_V_ptr, smoothing_row_D_ptr, classes, pairs, D, V):
    """Return the sums minus the smoothing term: these classes' weights times the smoothing row."""
    even_h, odd_h = _load_smoothing_row(smoothing_row_D_ptr, pairs, pairs < D // 2)
    if class_weight_V_ptr is None:
        return even_vh - even_h[None, :], odd_vh - odd_h[None, :]
    else:
        weight_v = tl.load(class_weight_V_ptr + classes, mask=classes < V, other=0.0)
        return even_vh - weight_v[:, None] * even_h[None, :], odd_vh - weight_v[:, None] * odd_h[None, :]


@triton.jit
def left_to_targets(even_vh, odd_vh, first_V_ptr, low_CP_ptr, classes, pairs, C, D, V):
    """Return the pairs to store: rounded, or for a target's class the upper 16 bits of each number.

    The lower bits of such a class are stored at the place where it begins in the sorted targets.
    first_V holds that place, or C for a class that is no target.
    """
    place_v = tl.load(first_V_ptr + classes, mask=classes < V, other=C)
    is_target_v = place_v < C
    upper_vh, low_vh = to_pairs(even_vh, odd_vh, low_CP_ptr.dtype.element_ty)
    place_vh = place_v[:, None].to(tl.int64) * (D // 2) + pairs[None, :]
    mask_vh = is_target_v[:, None] & (pairs[None, :] < D // 2)
    tl.store(low_CP_ptr + place_vh, low_vh, mask=mask_vh)
    return tl.where(is_target_v[:, None], upper_vh, rounded_pairs(even_vh, odd_vh, 1.0))


@triton.jit
def added_tiles(count_ptr, first_place, C, tiles, ALWAYS: tl.constexpr):
    """Return the number of tiles to compute: all, or none if no row of the chunk counts.

    ALWAYS: return all in either case, because each tile has to be written.
    """
    if ALWAYS or count_ptr is None:
        return tiles
    else:
        return tl.where(counted_rows(count_ptr, first_place, C) > 0, tiles, 0)


@remember_launches
@triton.jit
def _add_product_kernel(
    exp_CV,
    x_CD,
    pair_VP_ptr,
    low_VP_ptr,
    factor_ptr,
    class_weight_V_ptr,
    smoothing_row_D_ptr,
    first_V_ptr,
    low_CP_ptr,
    count_ptr,
    first_place,
    C,
    D,
    V,
    ADD: tl.constexpr,
    PROGRAMS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Write exp^T x to the sum or, with ADD, add it.

    If a factor is given, for the last chunk, round the result to the gradient. If first_V_ptr is
    given, for the only chunk, round the classes that are no targets, as `left_to_targets` says.
    Grid: one program per multiprocessor, which takes tiles in turn.
    """
    tiles_v, tiles_d = tl.cdiv(V, BLOCK_V), tl.cdiv(D, BLOCK_D)
    ALWAYS: tl.constexpr = not ADD or factor_ptr is not None
    tiles = added_tiles(count_ptr, first_place, C, tiles_v * tiles_d, ALWAYS)
    rows = counted_rows(count_ptr, first_place, C)
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        tile_v, tile_d = tile_at(tile, tiles_v, tiles_d, GROUP)
        sum_vd = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        for start in range(0, rows, BLOCK_C):
            exp_cv = exp_CV.load([start, tile_v * BLOCK_V])
            x_cd = x_CD.load([start, tile_d * BLOCK_D])
            sum_vd = tl.dot(exp_cv.T, x_cd, sum_vd)
        classes = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        # Take one half after the other, because the previous sum takes registers too.
        halves_vh = halves(sum_vd)
        for half in tl.static_range(2):
            even_vh, odd_vh = tl.split(tl.reshape(halves_vh[half], (BLOCK_V, BLOCK_D // 4, 2)))
            pairs = tile_d * (BLOCK_D // 2) + half * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
            place_vh = classes[:, None].to(tl.int64) * (D // 2) + pairs[None, :]
            mask_vh = (classes[:, None] < V) & (pairs[None, :] < D // 2)
            pair_ptr, low_ptr = pair_VP_ptr + place_vh, low_VP_ptr + place_vh
            if ADD:
                even_before_vh, odd_before_vh = load_pairs(pair_ptr, low_ptr, mask_vh)
                even_vh, odd_vh = even_vh + even_before_vh, odd_vh + odd_before_vh
            if first_V_ptr is not None:
                pair_vh = left_to_targets(even_vh, odd_vh, first_V_ptr, low_CP_ptr, classes, pairs, C, D, V)
                tl.store(pair_ptr, pair_vh, mask=mask_vh)
            elif factor_ptr is None:
                store_pairs(pair_ptr, low_ptr, even_vh, odd_vh, mask_vh)
            else:
                if smoothing_row_D_ptr is not None:
                    even_vh, odd_vh = less_smoothing(
                        even_vh, odd_vh, class_weight_V_ptr, smoothing_row_D_ptr, classes, pairs, D, V
                    )
                tl.store(pair_ptr, rounded_pairs(even_vh, odd_vh, tl.load(factor_ptr)), mask=mask_vh)


@remember_launches
@triton.jit
def _round_kernel(
    pair_VP_ptr, low_VP_ptr, factor_ptr, class_weight_V_ptr, smoothing_row_D_ptr, D, BLOCK: tl.constexpr
):
    """Compute gradient = bfloat16(factor (sum - class_weight smoothing_row)).

    Grid: one program per class.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr)
    for start in range(0, D // 2, BLOCK):
        pairs = start + tl.arange(0, BLOCK)
        place, mask = row * (D // 2) + pairs, pairs < D // 2
        even, odd = load_pairs(pair_VP_ptr + place, low_VP_ptr + place, mask)
        if smoothing_row_D_ptr is not None:
            even_row, odd_row = _load_smoothing_row(smoothing_row_D_ptr, pairs, mask)
            if class_weight_V_ptr is not None:
                class_weight = tl.load(class_weight_V_ptr + row)
                even_row, odd_row = even_row * class_weight, odd_row * class_weight
            even, odd = even - even_row, odd - odd_row
        tl.store(pair_VP_ptr + place, rounded_pairs(even, odd, factor), mask=mask)


def add_product(
    pair_VP: Tensor,
    low_VP: Tensor,
    exp_CV: Tensor,
    x_CD: Tensor,
    *,
    add: bool,
    counted: CountedChunk = ALL,
    rounding: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
    targets: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Write exp_CV^T x_CD to the sum or, with `add`, add it.

    `rounding` is given for the last of several chunks: the factor, and the class weights and row of
    the smoothing term. The sum minus that term is then multiplied by the factor and rounded.

    `targets` is given for the only chunk: first_V, the place in the sorted targets where each class
    begins, or C for a class that is no target; and low_CP, which gets the lower bits of the
    targets' classes, by place. The other classes are rounded, and low_VP is not written.
    """
    V, (C, D) = pair_VP.shape[0], x_CD.shape
    programs = multiprocessors(x_CD.device)
    _add_product_kernel[(programs,)](
        describe(exp_CV, BLOCK_C, BLOCK_V),
        describe(x_CD, BLOCK_C, BLOCK_D),
        pair_VP,
        low_VP,
        *rounding,
        *targets,
        *counted[1:],
        C,
        D,
        V,
        ADD=add,
        PROGRAMS=programs,
        GROUP=GROUP,
        BLOCK_V=BLOCK_V,
        BLOCK_D=BLOCK_D,
        BLOCK_C=BLOCK_C,
        # If stores cannot be vectorised, the tile to store takes the memory of one stage.
        num_stages=4 if D % 16 == 0 else 3,
        num_warps=WARPS,
    )


def round_(
    pair_VP: Tensor,
    low_VP: Tensor,
    factor: Tensor,
    class_weight_V: Tensor | None,
    smoothing_row_D: Tensor | None,
) -> None:
    """Round factor times the sum minus the smoothing term to the gradient, in place."""
    V, P = pair_VP.shape
    block = min(512, next_power_of_2(P))
    _round_kernel[(V,)](pair_VP, low_VP, factor, class_weight_V, smoothing_row_D, 2 * P, BLOCK=block)
