"""Builds of the kernels by which weights and inputs get their gradients."""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import (
    BF16,
    COUNTED,
    F32,
    I32,
    I32_PTR,
    I64,
    ONLY,
    ROUNDING,
    Build,
)


def _rows(kernel: str, module: str = "row_kernels", warps: int = 4, **arguments: Any) -> Build:
    return Build(f"ops.linear_cross_entropy.engines.weight_gradient.{module}", kernel, arguments, warps)


def _target_rows(kernel: str, warps: int = 2, **arguments: Any) -> Build:
    return _rows(kernel, "target_rows", warps, **arguments)


def _add_product(**changes: Any) -> Build:
    arguments = {
        "exp_CV": "tensordesc<bf16[64, 128]>",
        "x_CD": "tensordesc<bf16[64, 256]>",
        "pair_VP_ptr": "*i32",
        "low_VP_ptr": "*u16",
        **dict.fromkeys((*ROUNDING, *ONLY), None),
        **COUNTED,
        **dict.fromkeys(("C", "D", "V"), I32),
        "PROGRAMS": 132,
        "GROUP": 8,
        "BLOCK_V": 128,
        "BLOCK_D": 256,
        "BLOCK_C": 64,
    }
    return Build(
        "ops.linear_cross_entropy.engines.weight_gradient.packed_triton",
        "_add_product_kernel",
        arguments | changes,
        8,
        4,
        (90,),
    )


BUILDS = {
    "target logits": _rows(
        "_target_logits_kernel", x_CD_ptr=BF16, weight_VD_ptr=BF16, target_C_ptr=I64, ignored_C_ptr="*i1",
        logit_C_ptr=F32, reference_C_ptr=F32, marks_ptr=I32_PTR, **COUNTED, x_stride=I32, weight_stride=I32,
        C=I32, D=I32, HEIGHT=128, BLOCK=1024,
    ),
    "scale rows": _rows(
        "_scale_rows_kernel", x_CD_ptr=BF16, row_scale_C_ptr=F32, factor_ptr=F32, out_CD_ptr=BF16,
        **COUNTED, x_stride=I32, out_stride=I32, C=I32, D=I32, BLOCK=1024,
    ),
    "rows, gathered": _rows(
        "_gather_rows_kernel", x_ptr=F32, row_C_ptr=I64, **COUNTED, out_CD_ptr=BF16, out_stride=I32,
        outer_stride=I32, inner_stride=I32, inner=I32, C=I32, D=I32, BLOCK=1024,
    ),
    "rows, cleared": _rows(
        "_clear_rows_kernel", matrix_ptr=BF16, row_C_ptr=I64, **COUNTED, stride=I32, C=I32, D=I32, BLOCK=1024,
    ),
    "input gradient": _rows(
        "_input_gradient_kernel", product_CD_ptr=F32, weight_VD_ptr=BF16, target_C_ptr=I64,
        ignored_C_ptr="*i1", row_scale_C_ptr=F32, target_weight_coef_C_ptr=F32,
        smoothing_coef_C_ptr=F32, total_weight_D_ptr=F32, factor_ptr=F32, out_CD_ptr=BF16,
        weight_stride=I32, out_stride=I32, D=I32, BLOCK=1024,
    ),
    "target rows": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr=F32, beside_ptr=None,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, V=I32, BY_PLACE=False,
        BLOCK_N=8, BLOCK=512,
    ),
    "target rows, few bits": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr="*i32", beside_ptr="*u8",
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, V=I32, BY_PLACE=False,
        BLOCK_N=8, BLOCK=512,
    ),
    "target rows, rounded": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr="*i32", beside_ptr="*u16",
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, V=I32, BY_PLACE=True,
        BLOCK_N=8, BLOCK=512,
    ),
    "target rows, formed again": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr=BF16, beside_ptr=F32,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, V=I32, BY_PLACE=True,
        BLOCK_N=8, BLOCK=512,
    ),
    "first places": _target_rows(
        "_first_places_kernel", warps=4, class_N_ptr=I32_PTR, first_V_ptr=I32_PTR,
        N=I32, V=I32, half=I32, BLOCK=512,
    ),
    "gather targets": _target_rows(
        "_gather_targets_kernel", warps=4, exp_CV_ptr=BF16, class_N_ptr=I32_PTR, out_CT_ptr=BF16,
        stride=I32, N=I32, V=I32, T=I32, BLOCK=512,
    ),
    "round a block": _target_rows(
        "_round_block_kernel", warps=4, sum_BD_ptr=F32, x_ptr=BF16, target_weight_coef_N_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, first_V_ptr=I32_PTR, class_weight_V_ptr=F32,
        smoothing_row_D_ptr=F32, factor_ptr=F32, out_VD_ptr=BF16,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, first_class=I32, BLOCK_N=16, BLOCK=512,
    ),
    "24 bits, first product": _add_product(ADD=False),
    "24 bits, another product": _add_product(ADD=True),
    "24 bits, the last product": _add_product(ADD=True, **dict.fromkeys(ROUNDING, F32)),
    "the only product": _add_product(ADD=False, first_V_ptr=I32_PTR, low_CP_ptr="*u16"),
    "20 bits, first product": _add_product(ADD=False, low_VP_ptr="*u8"),
    "20 bits, another product": _add_product(ADD=True, low_VP_ptr="*u8"),
    "20 bits, the last product": _add_product(
        ADD=True, low_VP_ptr="*u8", **dict.fromkeys(ROUNDING, F32)
    ),
    "24 bits, rounded": Build(
        "ops.linear_cross_entropy.engines.weight_gradient.packed_triton", "_round_kernel",
        {"pair_VP_ptr": "*i32", "low_VP_ptr": "*u16", "factor_ptr": F32, "class_weight_V_ptr": F32,
         "smoothing_row_D_ptr": F32, "D": I32, "BLOCK": 512}, warps=4,
    ),
    "20 bits, rounded": Build(
        "ops.linear_cross_entropy.engines.weight_gradient.packed_triton", "_round_kernel",
        {"pair_VP_ptr": "*i32", "low_VP_ptr": "*u8", "factor_ptr": F32, "class_weight_V_ptr": F32,
         "smoothing_row_D_ptr": F32, "D": I32, "BLOCK": 512}, warps=4,
    ),
}  # fmt: skip
LEFT_OUT = {
    80: ("target rows",),
    90: (
        "target rows",
        "20 bits, first product",
        "20 bits, another product",
        "20 bits, rounded",
        "24 bits, another product",
    ),
}
