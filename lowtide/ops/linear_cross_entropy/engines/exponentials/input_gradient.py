"""Form the rows of dX that count (counted_rows.py) in one Triton kernel, and skip ignored rows.

exponentials/engine.py has the formula. cuBLAS cannot read the number of rows that count, which only
the device knows. If no row is ignored, cuBLAS may take less time than this kernel (decision 0078).

Shapes: N tokens, D features, V classes; C tokens of a chunk; lower case = one tile, q a quarter of
its features.
"""

import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import counted_rows, row_at
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import describe, halves, multiprocessors, tile_at

BLOCK_C, BLOCK_D, BLOCK_V = 128, 256, 64
STAGES, WARPS = 4, 8
GROUP = 8  # row tiles that read a block of the weight's features while it is in the L2 cache


@remember_launches
@triton.jit
def _input_gradient_product_kernel(
    exp_CV, weight_VD, weight_VD_ptr, target_C_ptr, ignored_C_ptr, row_scale_C_ptr,
    target_weight_coef_ptr, smoothing_coef_C_ptr, total_weight_D_ptr, factor_ptr, out_ptr,
    row_C_ptr, count_ptr, first_place, weight_stride, out_stride, C, D, V,
    PROGRAMS: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the product E W and the rows of dX from it.

    `_input_gradient_kernel` in row_kernels.py has the formula of a row. Grid: one program per
    multiprocessor, which takes tiles in turn.
    """
    counted = counted_rows(count_ptr, first_place, C)
    tiles_c, tiles_d = tl.cdiv(counted, BLOCK_C), tl.cdiv(D, BLOCK_D)
    factor = 1.0
    if factor_ptr is not None:
        factor = tl.load(factor_ptr)
    for tile in tl.range(tl.program_id(0), tiles_c * tiles_d, PROGRAMS, flatten=True):
        tile_c, tile_d = tile_at(tile, tiles_c, tiles_d, GROUP)
        sum_cd = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for start in range(0, V, BLOCK_V):
            exp_cv = exp_CV.load([tile_c * BLOCK_C, start])
            weight_vd = weight_VD.load([start, tile_d * BLOCK_D])
            sum_cd = tl.dot(exp_cv, weight_vd, sum_cd)
        places = tile_c * BLOCK_C + tl.arange(0, BLOCK_C)
        inside = places < counted
        rows = row_at(row_C_ptr, places, inside).to(tl.int64)
        target_c = tl.load(target_C_ptr + places, mask=inside, other=0)
        ignored_c = tl.load(ignored_C_ptr + places, mask=inside, other=1) != 0
        scale_c = tl.load(row_scale_C_ptr + places, mask=inside, other=0.0)
        coef_c = tl.load(target_weight_coef_ptr + rows, mask=inside, other=0.0)
        # Take a quarter of the features at a time, because what is loaded takes registers beside
        # the sum.
        halves_ch = halves(sum_cd)
        for part in tl.static_range(4):
            sum_cq = halves(halves_ch[part // 2])[part % 2]
            columns = tile_d * BLOCK_D + part * (BLOCK_D // 4) + tl.arange(0, BLOCK_D // 4)
            mask_cq = inside[:, None] & (columns < D)[None, :]
            weight_ptr = weight_VD_ptr + (target_c * weight_stride)[:, None] + columns[None, :]
            weight_cq = tl.load(weight_ptr, mask=mask_cq, other=0.0).to(tl.float32)
            grad_cq = sum_cq * scale_c[:, None] + coef_c[:, None] * weight_cq
            if smoothing_coef_C_ptr is not None:
                smoothing_c = tl.load(smoothing_coef_C_ptr + places, mask=inside, other=0.0)
                total_q = tl.load(total_weight_D_ptr + columns, mask=columns < D, other=0.0)
                grad_cq -= smoothing_c[:, None] * total_q[None, :]
            grad_cq = tl.where(ignored_c[:, None], 0.0, grad_cq * factor)
            out_cq_ptr = out_ptr + (rows * out_stride)[:, None] + columns[None, :]
            tl.store(out_cq_ptr, grad_cq.to(out_ptr.dtype.element_ty), mask=mask_cq)


def input_gradient(
    exp_CV: Tensor,
    weight_VD: Tensor,
    target_C: Tensor,
    ignored_C: Tensor,
    row_scale_C: Tensor,
    target_weight_coef_N: Tensor,
    smoothing_coef_C: Tensor | None,
    total_weight_D: Tensor | None,
    factor: Tensor | None,
    out_ND: Tensor,
    counted: CountedChunk,
) -> None:
    """Write each row of dX that counts to its own row of out_ND."""
    (C, V), D, programs = exp_CV.shape, weight_VD.shape[1], multiprocessors(exp_CV.device)
    width = max(32, min(BLOCK_D, triton.next_power_of_2(D)))
    _input_gradient_product_kernel[(programs,)](
        describe(exp_CV, BLOCK_C, BLOCK_V),
        describe(weight_VD, BLOCK_V, width),
        weight_VD,
        target_C,
        ignored_C,
        row_scale_C,
        target_weight_coef_N,
        smoothing_coef_C,
        total_weight_D,
        factor,
        out_ND,
        *counted,
        weight_VD.stride(0),
        out_ND.stride(0),
        C,
        D,
        V,
        PROGRAMS=programs,
        GROUP=GROUP,
        BLOCK_C=BLOCK_C,
        BLOCK_D=width,
        BLOCK_V=BLOCK_V,
        num_stages=STAGES,
        num_warps=WARPS,
    )
