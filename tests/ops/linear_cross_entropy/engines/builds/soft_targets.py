"""Builds of the kernels of the engine for probabilities."""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import F32, I32, TWO_TERMS, Build


def _distances(**changes: Any) -> Build:
    arguments = {
        "x_CD": "tensordesc<bf16[128, 64]>",
        "weight_BD": "tensordesc<bf16[256, 64]>",
        **dict.fromkeys(("x_CR", "weight_BR", "bias_B_ptr", "scale_ptr", "class_weight_B_ptr")),
        "distance_CB": "tensordesc<i16[128, 128]>",
        "soft_CB_ptr": "*bf16",
        "partials_CT4_ptr": F32,
        **dict.fromkeys(("C", "B", "D", "T", "soft_row_stride"), I32),
        "soft_stride": 1,
        **dict.fromkeys(("keep", "floor"), "fp32"),
        "SMOOTHED": False,
        "STORE": True,
        "PTX": True,
        "PROGRAMS": 132,
        "GROUP": 8,
        "BLOCK_C": 128,
        "BLOCK_B": 256,
        "BLOCK_D": 64,
    }
    spills, stages = changes.pop("spills", 0), 3
    return Build(
        "ops.linear_cross_entropy.engines.soft_targets.gemm_triton",
        "_distances_kernel",
        arguments | changes,
        8,
        stages,
        (90,),
        spills,
    )


def _distance_gradient(**changes: Any) -> Build:
    arguments = {
        "partials_CT4_ptr": F32,
        "distance_CB_ptr": "*i16",
        "grad_CB_ptr": "*bf16",
        "soft_CB_ptr": "*bf16",
        "class_weight_B_ptr": None,
        "soft_target_coef_C_ptr": F32,
        **dict.fromkeys(("B", "T", "stride", "soft_row_stride"), I32),
        "soft_stride": 1,
        **dict.fromkeys(("keep", "floor"), "fp32"),
        "SMOOTHED": False,
        "WIDTH": 128,
        "BLOCK": 2048,
    }
    return Build(
        "ops.linear_cross_entropy.engines.soft_targets.softmax_triton",
        "_gradient_kernel",
        arguments | changes,
        warps=8,
        targets=(90,),
    )


BUILDS = {
    "distances": _distances(),
    "distances, sums": _distances(distance_CB=None, STORE=False),
    "distances, strided": _distances(soft_stride=I32, spills=256),
    "distances, two terms": _distances(**TWO_TERMS),
    "distances, all": _distances(
        **TWO_TERMS, bias_B_ptr=F32, scale_ptr=F32, class_weight_B_ptr=F32, SMOOTHED=True, spills=96
    ),
    "distances, rows": Build(
        "ops.linear_cross_entropy.engines.soft_targets.softmax_triton", "_rows_kernel",
        {"partials_CT4_ptr": F32, "soft_target_coef_C_ptr": F32, "lse_coef_C_ptr": F32,
         **dict.fromkeys(("max_C_ptr", "sum_C_ptr", "soft_mass_C_ptr", "soft_nll_C_ptr"), F32), "T": I32,
         "GRADIENT": True, "PARTS": 1024}, warps=4, targets=(90,),
    ),
    "distances, gradient": _distance_gradient(),
    "distances, gradient, all": _distance_gradient(
        class_weight_B_ptr=F32, soft_stride=I32, SMOOTHED=True
    ),
}  # fmt: skip
LEFT_OUT = {
    90: (
        "distances",
        "distances, sums",
        "distances, strided",
        "distances, two terms",
        "distances, gradient",
    ),
}
