"""Triton kernels of a float32 sum in 24 bits: the upper 16 lie where the bfloat16 gradient will be, the next
8 in a byte beside. Each addition rounds it by at most 2^-16 of itself (bfloat16 alone: 2^-9); the gradient is
rounded once, at the end.

Shapes: C tokens of a chunk, D features, V classes; lower case = one tile, h a half of its features.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.linear_cross_entropy.exponential_kernels import describe, multiprocessors

BLOCK_V, BLOCK_D, BLOCK_C = 128, 256, 64
WARPS = 8
GROUP = 8  # tiles of classes that share the features of a chunk while those are in the L2 cache


@triton.jit
def load_24(high_ptr, low_ptr, mask):
    high = tl.load(high_ptr, mask=mask, other=0).to(tl.int32)
    low = tl.load(low_ptr, mask=mask, other=0).to(tl.int32)
    return ((high << 16) | (low << 8)).to(tl.float32, bitcast=True)


@triton.jit
def store_24(high_ptr, low_ptr, value, mask):
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(value == value, bits + 0x80, bits)  # to the nearest; a NaN of all ones would become 0
    tl.store(high_ptr, (bits >> 16).to(tl.int16), mask=mask)
    tl.store(low_ptr, (bits >> 8).to(tl.uint8), mask=mask)


@triton.jit
def _add_product_kernel(
    exp_CV,
    x_CD,
    high_VD_ptr,
    low_VD_ptr,
    factor_ptr,
    class_weight_V_ptr,
    spread_D_ptr,
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
    """sum (+)= exp^T x; with a factor, the last time, it is rounded. Grid: one program a multiprocessor, each
    tile in turn."""
    tiles_v, tiles_d = tl.cdiv(V, BLOCK_V), tl.cdiv(D, BLOCK_D)
    group_tiles = GROUP * tiles_d
    for tile in tl.range(tl.program_id(0), tiles_v * tiles_d, PROGRAMS, flatten=True):
        first_v = tile // group_tiles * GROUP
        height = min(tiles_v - first_v, GROUP)
        tile_v = first_v + tile % group_tiles % height
        tile_d = tile % group_tiles // height
        sum_vd = tl.zeros((BLOCK_V, BLOCK_D), tl.float32)
        for start in range(0, C, BLOCK_C):
            exp_cv = exp_CV.load([start, tile_v * BLOCK_V])
            x_cd = x_CD.load([start, tile_d * BLOCK_D])
            sum_vd = tl.dot(exp_cv.T, x_cd, sum_vd)
        classes = tile_v * BLOCK_V + tl.arange(0, BLOCK_V)
        # One half after the other: what is added is in registers too.
        halves = tl.split(tl.permute(tl.reshape(sum_vd, (BLOCK_V, 2, BLOCK_D // 2)), (0, 2, 1)))
        for half in tl.static_range(2):
            sum_vh = halves[half]
            columns = tile_d * BLOCK_D + half * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)
            place_vh = classes[:, None].to(tl.int64) * D + columns[None, :]
            mask_vh = (classes[:, None] < V) & (columns[None, :] < D)
            high_ptr, low_ptr = high_VD_ptr + place_vh, low_VD_ptr + place_vh
            if ADD:
                sum_vh += load_24(high_ptr, low_ptr, mask_vh)
            if factor_ptr is None:
                store_24(high_ptr, low_ptr, sum_vh, mask_vh)
            else:
                if spread_D_ptr is not None:
                    spread_vh = tl.load(spread_D_ptr + columns, mask=columns < D, other=0.0)[None, :]
                    if class_weight_V_ptr is not None:
                        weight_v = tl.load(class_weight_V_ptr + classes, mask=classes < V, other=0.0)
                        spread_vh *= weight_v[:, None]
                    sum_vh -= spread_vh
                rounded_vh = (sum_vh * tl.load(factor_ptr)).to(tl.bfloat16)
                tl.store(high_ptr, rounded_vh.to(tl.int16, bitcast=True), mask=mask_vh)


@triton.jit
def _round_kernel(
    high_VD_ptr, low_VD_ptr, factor_ptr, class_weight_V_ptr, spread_D_ptr, D, BLOCK: tl.constexpr
):
    """high = bfloat16 of factor (sum - class_weight spread). Grid: one program a class."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        place = row * D + columns
        sum_d = load_24(high_VD_ptr + place, low_VD_ptr + place, columns < D)
        if spread_D_ptr is not None:
            spread_d = tl.load(spread_D_ptr + columns, mask=columns < D, other=0.0)
            if class_weight_V_ptr is not None:
                spread_d *= tl.load(class_weight_V_ptr + row)
            sum_d -= spread_d
        rounded_d = (sum_d * factor).to(tl.bfloat16)
        tl.store(high_VD_ptr + place, rounded_d.to(tl.int16, bitcast=True), mask=columns < D)


def add_product(
    high_VD: Tensor,
    low_VD: Tensor,
    exp_CV: Tensor,
    x_CD: Tensor,
    *,
    add: bool,
    rounding: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> None:
    """`rounding`, the last time: the factor; class weights and features of what is subtracted before."""
    (V, D), C = high_VD.shape, x_CD.shape[0]
    programs = multiprocessors(x_CD.device)
    _add_product_kernel[(programs,)](
        describe(exp_CV, BLOCK_C, BLOCK_V),
        describe(x_CD, BLOCK_C, BLOCK_D),
        high_VD,
        low_VD,
        *rounding,
        C,
        D,
        V,
        ADD=add,
        PROGRAMS=programs,
        GROUP=GROUP,
        BLOCK_V=BLOCK_V,
        BLOCK_D=BLOCK_D,
        BLOCK_C=BLOCK_C,
        num_stages=4 if D % 16 == 0 else 3,  # without vectors to store, the tile takes a stage's memory
        num_warps=WARPS,
    )


def round_(
    high_VD: Tensor, low_VD: Tensor, factor: Tensor, class_weight_V: Tensor | None, spread_D: Tensor | None
) -> None:
    V, D = high_VD.shape
    block = min(1024, triton.next_power_of_2(D))
    _round_kernel[(V,)](high_VD, low_VD, factor, class_weight_V, spread_D, D, BLOCK=block)
