"""Builds of the kernels of the exponentials engine."""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import (
    BF16,
    COUNTED,
    F32,
    FOUND,
    I32,
    I32_PTR,
    I64,
    TILTED,
    TWO_TERMS,
    Build,
)


def _exponentials(**changes: Any) -> Build:
    absent = (
        "bias_B",
        "scale",
        "softmax_coef_C",
        "entropy_coef_C",
        "factor_C",
        "marks",
        "mean",
        "grad_dot_logit",
        "max",
        "argmax",
    )
    arguments = {
        "x_CD": "tensordesc<bf16[128, 64]>",
        "weight_BD": "tensordesc<bf16[256, 64]>",
        **dict.fromkeys(("x_CR", "weight_BR")),
        "exp_CB": "tensordesc<bf16[128, 128]>",
        "reference_C_ptr": F32,
        "target_C_ptr": "*i64",
        **dict.fromkeys(f"{name}_ptr" for name in absent),
        "sum_ptr": F32,
        **COUNTED,
        **dict.fromkeys(("C", "B", "D", "first_class"), I32),
        "STORE": True,
        "GUARDED": False,
        "ADD": False,
        "MASKED": False,
        "RECOMPUTE": False,
        "SOFTCAP": 0.0,
        "PROGRAMS": 132,
        "GROUP": 8,
        "BLOCK_C": 128,
        "BLOCK_B": 256,
        "BLOCK_D": 64,
    }
    spills, stages = changes.pop("spills", 0), 3
    return Build(
        "ops.linear_cross_entropy.engines.exponentials.gemm.gemm_triton",
        "exponentials_kernel",
        arguments | changes,
        8,
        stages,
        (90,),
        spills,
    )


_BENT = {"bias_B_ptr": F32, "scale_ptr": F32, "SOFTCAP": 30.0}
_GRADIENT = {"factor_C_ptr": F32, "GUARDED": True, "sum_ptr": None}


_INPUT_GRADIENT = "ops.linear_cross_entropy.engines.exponentials.input_gradient"
_SPLIT = {
    **{"PROGRAMS": 132, "FEWEST": 1024, "GROUP": 8},
    **{"BLOCK_C": 128, "BLOCK_D": 256, "BLOCK_V": 64},
}


def _input_gradient(**changes: Any) -> Build:
    vectors = ("row_scale_C_ptr", "target_weight_coef_ptr", "factor_ptr")
    arguments = {
        "exp_CV": "tensordesc<bf16[128, 64]>",
        "weight_VD": "tensordesc<bf16[64, 256]>",
        "weight_VD_ptr": BF16,
        "target_C_ptr": I64,
        "ignored_C_ptr": "*i1",
        **dict.fromkeys(vectors, F32),
        **dict.fromkeys(("smoothing_coef_C_ptr", "total_weight_D_ptr")),
        "out_ptr": BF16,
        "row_C_ptr": I64,
        **COUNTED,
        **dict.fromkeys(("weight_stride", "out_stride", "C", "D", "V"), I32),
        **_SPLIT,
    }
    return Build(_INPUT_GRADIENT, "_input_gradient_product_kernel", arguments | changes, 8, 4, (90,))


def _summed_parts(**changes: Any) -> Build:
    arguments = {**_input_gradient().arguments, "part_ptr": F32, "ROWS": 32} | changes
    for name in ("exp_CV", "weight_VD"):
        del arguments[name]
    return Build(_INPUT_GRADIENT, "_sum_parts_kernel", arguments, 8)


_REDUCING = {"HEIGHT": 128, "BLOCK_C": 32, "BLOCK_T": 128}


def _sums(**changes: Any) -> Build:
    arguments = {"partials_TC_ptr": F32, "out_C_ptr": F32, "marks_ptr": I32_PTR, "T": I32, "C": I32}
    arguments |= COUNTED
    module = "ops.linear_cross_entropy.engines.exponentials.recompute"
    return Build(module, "_sum_kernel", {**arguments, **_REDUCING, **changes}, warps=8)


BUILDS = {
    "exponentials": _exponentials(),
    "exponentials, sums": _exponentials(exp_CB=None, STORE=False),
    "exponentials, maxima": _exponentials(exp_CB=None, STORE=False, sum_ptr=None, max_ptr=F32,
        marks_ptr=I32_PTR, RECOMPUTE=True),
    "exponentials, repair": _exponentials(marks_ptr=I32_PTR, GUARDED=True, RECOMPUTE=True, ADD=True),
    "exponentials, known statistics": _exponentials(GUARDED=True, sum_ptr=None),
    "exponentials, gradient": _exponentials(**_GRADIENT),
    "exponentials, gradient, all": _exponentials(**_GRADIENT, **_BENT),
    "exponentials, bias": _exponentials(bias_B_ptr=F32),
    "exponentials, scale": _exponentials(scale_ptr=F32),
    "exponentials, scale's gradient": _exponentials(scale_ptr=F32, grad_dot_logit_ptr=F32, ADD=True),
    "exponentials, soft cap": _exponentials(SOFTCAP=30.0),
    "exponentials, all": _exponentials(**_BENT, MASKED=True, grad_dot_logit_ptr=F32, spills=320),
    "exponentials, all, another block": _exponentials(
        **_BENT, MASKED=True, ADD=True, grad_dot_logit_ptr=F32, spills=352
    ),
    "exponentials, log-probabilities": _exponentials(exp_CB=None, STORE=False, **FOUND),
    "exponentials, log-probabilities, all": _exponentials(exp_CB=None, STORE=False, **FOUND, **_BENT,
        spills=72),
    "exponentials, gradient of entropy": _exponentials(**TILTED, spills=20),
    "exponentials, gradient of entropy, all": _exponentials(
        **TILTED, **_BENT, MASKED=True, grad_dot_logit_ptr=F32, spills=544
    ),
    "exponentials, two terms": _exponentials(**TWO_TERMS),
    "exponentials, two terms, all": _exponentials(
        **TWO_TERMS, **_BENT, MASKED=True, grad_dot_logit_ptr=F32, spills=600
    ),
    "exponentials, two terms, gradient of entropy": _exponentials(**TWO_TERMS, **TILTED, spills=20),
    "rows of dX": _input_gradient(),
    "rows of dX, in float32, smoothing": _input_gradient(
        out_ptr=F32, smoothing_coef_C_ptr=F32, total_weight_D_ptr=F32
    ),
    "parts of rows of dX": Build(
        _INPUT_GRADIENT, "_parts_kernel",
        {"exp_CV": "tensordesc<bf16[128, 64]>", "weight_VD": "tensordesc<bf16[64, 256]>", "part_ptr": F32,
         **COUNTED, **dict.fromkeys(("C", "D", "V"), I32), **_SPLIT},
        8, 4, (90,),
    ),
    "summed parts of rows of dX": _summed_parts(),
    "summed parts of rows of dX, in float32, smoothing": _summed_parts(
        out_ptr=F32, smoothing_coef_C_ptr=F32, total_weight_D_ptr=F32
    ),
    "repaired product": Build(
        "ops.linear_cross_entropy.engines.exponentials.recompute", "_recomputed_product_kernel",
        {"exp_CB": "tensordesc<bf16[128, 64]>", "weight_BD": "tensordesc<bf16[64, 128]>",
         "marks_ptr": I32_PTR, "sum_CD_ptr": F32, **dict.fromkeys(("C", "B", "D"), I32), "ADD": True,
         "BLOCK_C": 128, "BLOCK_B": 64, "BLOCK_D": 128}, 8, 3, (90,),
    ),
    "infinite logits": Build(
        "ops.linear_cross_entropy.engines.exponentials.recompute", "_mark_infinite_kernel",
        {"maxima_TC_ptr": F32, "ignored_C_ptr": "*i1", "marks_ptr": I32_PTR, "T": I32, "C": I32, **_REDUCING},
        warps=8,
    ),
    "row log-probabilities": Build(
        "ops.linear_cross_entropy.engines.exponentials.row_log_probs", "_log_probs_kernel",
        {**dict.fromkeys(("sum_TC_ptr", "mean_TC_ptr", "max_TC_ptr", "logit_C_ptr", "max_C_ptr", "sum_C_ptr",
            "mean_C_ptr"), F32), "argmax_TC_ptr": I32_PTR, "target_C_ptr": I64, "argmax_C_ptr": I64,
         **COUNTED, "T": I32, "C": I32, **_REDUCING}, warps=8,
    ),
    "parts, added up": _sums(MARK=True),
    "parts, added up again": _sums(MARK=False),
    "references": Build(
        "ops.linear_cross_entropy.engines.exponentials.recompute", "_references_kernel",
        {**dict.fromkeys(("maxima_TC_ptr", "sum_C_ptr", "reference_C_ptr"), F32), "ignored_C_ptr": "*i1",
         "marks_ptr": I32_PTR, "T": I32, "C": I32, **_REDUCING}, warps=8,
    ),
    "targets in order": Build(
        "ops.linear_cross_entropy.engines.exponentials.target_order", "_order_kernel",
        {"target_N_ptr": I64, "ignored_N_ptr": "*i1", "class_N_ptr": I32_PTR, "order_N_ptr": I64,
         **dict.fromkeys(("N", "first_class", "V", "chunk"), I32), "BLOCK": 8, "WIDTH": 512}, warps=4,
    ),
    "keys of targets": Build(
        "ops.linear_cross_entropy.engines.exponentials.target_order", "_key_kernel",
        {"target_N_ptr": I64, "ignored_N_ptr": "*i1", "key_N_ptr": I32_PTR,
         **dict.fromkeys(("N", "first_class", "V", "chunk"), I32), "BLOCK": 512}, warps=4,
    ),
    "coefficients": Build(
        "ops.linear_cross_entropy.engines.exponentials.row_coefficients", "_coefficients_kernel",
        {**dict.fromkeys((f"{name}_C_ptr" for name in (
            "logit", "max", "sum", "softmax_coef", "target_coef", "lse_coef", "entropy_coef", "slope",
            "nll", "row_scale"
        )), F32), "target_weight_coef_ptr": F32, "row_C_ptr": I64, "ignored_C_ptr": "*i1",
         "partials_TC_ptr": F32, "marks_ptr": I32_PTR, "T": I32, "C": I32, **_REDUCING}, warps=8,
    ),
}  # fmt: skip
LEFT_OUT = {
    90: (
        "exponentials, sums",
        "exponentials, known statistics",
        "exponentials, gradient, all",
        "exponentials, bias",
        "exponentials, scale",
        "exponentials, scale's gradient",
        "exponentials, soft cap",
        "exponentials, all",
        "exponentials, all, another block",
        "exponentials, log-probabilities, all",
        "exponentials, gradient of entropy",
        "exponentials, two terms, all",
        "exponentials, two terms, gradient of entropy",
    ),
}
