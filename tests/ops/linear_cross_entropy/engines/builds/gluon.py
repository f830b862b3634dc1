"""Builds of the kernels in Gluon, which are pipelined; for Hopper alone."""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import (
    COUNTED,
    F32,
    FOUND,
    I32,
    I32_PTR,
    I64,
    ONLY,
    ROUNDING,
    TILTED,
    Build,
)

_LAUNCH = {"PROGRAMS": 132, "GROUP": 8, "STAGES": 4, "REGISTERS": (232, 40)}
_OPERANDS = {"x_CD": "tensordesc<bf16[64, 64]>", "weight_BD": "tensordesc<bf16[256, 64]>"}
_PIPELINE_TERMS = {"x_CR": "tensordesc<bf16[64, 64]>", "weight_BR": "tensordesc<bf16[256, 64]>"}


def _pipelined_exponentials(**changes: Any) -> Build:
    absent = ("bias_B", "scale", "softmax_coef_C", "entropy_coef_C", "factor_C")
    partials = ("mean", "grad_dot_logit", "max", "argmax")
    arguments = {
        **_OPERANDS,
        **dict.fromkeys(("x_CR", "weight_BR")),
        "exp_CB": "tensordesc<bf16[64, 128]>",
        "reference_C_ptr": F32,
        "target_C_ptr": I64,
        **dict.fromkeys(f"{name}_ptr" for name in absent + partials),
        "sum_ptr": F32,
        **COUNTED,
        **dict.fromkeys(("C", "B", "D", "first_class"), I32),
        "STORE": True,
        "GUARDED": False,
        "ADD": False,
        **_LAUNCH,
    }
    spills = changes.pop("spills", 0)
    return Build(
        "ops.linear_cross_entropy.engines.exponentials.gemm.gemm_gluon",
        "exponentials_kernel",
        arguments | changes,
        4,
        targets=(90,),
        spills=spills,
    )


def _distance_pipeline(**changes: Any) -> Build:
    arguments = {
        **_OPERANDS,
        **dict.fromkeys(("x_CR", "weight_BR", "bias_B_ptr", "scale_ptr", "class_weight_B_ptr")),
        "distance_CB": "tensordesc<i16[64, 128]>",
        "soft_CB": "tensordesc<bf16[64, 128]>",
        "partials_CT4_ptr": F32,
        **dict.fromkeys(("C", "B", "D", "T"), I32),
        **dict.fromkeys(("keep", "floor"), "fp32"),
        "SMOOTHED": False,
        **_LAUNCH,
    }
    spills = changes.pop("spills", 0)
    return Build(
        "ops.linear_cross_entropy.engines.soft_targets.gemm_gluon",
        "_distance_pipeline_kernel",
        arguments | changes,
        4,
        targets=(90,),
        spills=spills,
        fuses=changes.get("scale_ptr") is None,
    )


def _add_product(low: str, **changes: Any) -> Build:
    arguments = {
        "exp_CV": "tensordesc<bf16[64, 64]>",
        "x_CD": "tensordesc<bf16[64, 256]>",
        "pair_VP": "tensordesc<i32[64, 64]>",
        "low_VP": f"tensordesc<{low}[64, 64]>",
        **dict.fromkeys((*ROUNDING, *ONLY)),
        **COUNTED,
        **dict.fromkeys(("C", "D", "V"), I32),
        **_LAUNCH,
    }
    spills = changes.pop("spills", 0)
    kernel = "_add_product_pipelined_kernel"
    return Build(
        "ops.linear_cross_entropy.engines.weight_gradient.packed_gluon",
        kernel,
        arguments | changes,
        warps=4,
        targets=(90,),
        spills=spills,
    )


_LAST = {"ADD": True, **dict.fromkeys(ROUNDING, F32), "spills": 8}
_BENT = {"bias_B_ptr": F32, "scale_ptr": F32}
BUILDS = {
    "pipeline, exponentials": _pipelined_exponentials(),
    "pipeline, another block": _pipelined_exponentials(ADD=True),
    "pipeline, scale's gradient, another block": _pipelined_exponentials(
        ADD=True, scale_ptr=F32, grad_dot_logit_ptr=F32, spills=12
    ),
    "pipeline, sums": _pipelined_exponentials(exp_CB=None, STORE=False),
    "pipeline, known statistics": _pipelined_exponentials(GUARDED=True, sum_ptr=None),
    "pipeline, gradient": _pipelined_exponentials(factor_C_ptr=F32, GUARDED=True, sum_ptr=None),
    "pipeline, bias and scale": _pipelined_exponentials(**_BENT, spills=4),
    "pipeline, scale's gradient": _pipelined_exponentials(scale_ptr=F32, grad_dot_logit_ptr=F32),
    "pipeline, log-probabilities": _pipelined_exponentials(exp_CB=None, STORE=False, **FOUND, spills=40),
    "pipeline, gradient of entropy": _pipelined_exponentials(**TILTED, spills=8),
    "pipeline, two terms": _pipelined_exponentials(**_PIPELINE_TERMS),
    "pipeline, two terms, bias and scale": _pipelined_exponentials(**_PIPELINE_TERMS, **_BENT, spills=4),
    "pipeline, distances": _distance_pipeline(),
    "pipeline, distances, sums": _distance_pipeline(distance_CB=None),
    "pipeline, distances, two terms": _distance_pipeline(**_PIPELINE_TERMS),
    "pipeline, distances, all": _distance_pipeline(
        **_PIPELINE_TERMS, bias_B_ptr=F32, scale_ptr=F32, class_weight_B_ptr=F32, SMOOTHED=True, spills=352
    ),
    "pipeline, 24 bits, first product": _add_product("u16", ADD=False),
    "pipeline, 24 bits, another product": _add_product("u16", ADD=True),
    "pipeline, 24 bits, the last product": _add_product("u16", **_LAST),
    "pipeline, the only product": _add_product("u16", ADD=False, first_V_ptr=I32_PTR, low_CP_ptr="*u16"),
    "pipeline, 20 bits, first product": _add_product("u8", ADD=False),
    "pipeline, 20 bits, another product": _add_product("u8", ADD=True),
    "pipeline, 20 bits, the last product": _add_product("u8", **_LAST),
}
LEFT_OUT = {
    90: (
        "pipeline, sums",
        "pipeline, known statistics",
        "pipeline, gradient",
        "pipeline, bias and scale",
        "pipeline, scale's gradient",
        "pipeline, scale's gradient, another block",
        "pipeline, two terms",
        "pipeline, two terms, bias and scale",
        "pipeline, gradient of entropy",
        "pipeline, distances",
        "pipeline, distances, sums",
        "pipeline, distances, two terms",
        "pipeline, 24 bits, first product",
        "pipeline, 24 bits, another product",
        "pipeline, 24 bits, the last product",
        "pipeline, 20 bits, first product",
        "pipeline, 20 bits, another product",
    ),
}
