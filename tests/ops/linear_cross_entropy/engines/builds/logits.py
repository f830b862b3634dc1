"""Builds of the kernels that work on stored logits, and of those that any call of them uses."""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import BF16, F32, I32, TARGETS, Build


def _softmax(gradient: str | None, **changes: Any) -> Build:
    absent = (
        "smoothing_coef",
        "soft_target_coef",
        "lse_coef",
        "entropy_coef",
        "smooth_nll",
        "soft_mass",
        "soft_nll",
        "mean",
        "argmax",
        "grad_dot_logit",
    )
    arguments = {
        "logits_CB_ptr": F32,
        "grad_CB_ptr": gradient or F32,
        "target_C_ptr": "*i64",
        "ignored_C_ptr": "*i1",
        **dict.fromkeys(
            ("softmax_coef_C_ptr", "target_coef_C_ptr", "max_C_ptr", "sum_C_ptr", "nll_C_ptr"), F32
        ),
        **dict.fromkeys(f"{name}_C_ptr" for name in absent),
        **dict.fromkeys(("bias_B_ptr", "class_weight_B_ptr", "soft_CB_ptr", "scale_ptr")),
        **dict.fromkeys(("B", "first_class", "soft_stride"), I32),
        **dict.fromkeys(("logits_stride", "grad_stride", "soft_row_stride"), "i32?"),
        **dict.fromkeys(("keep", "floor"), "fp32"),
        "SOFTCAP": 0.0,
        "TAKE_STATISTICS": True,
        "GRADIENT": gradient is not None,
        "SECOND_READ": gradient is not None,
        "BLOCK": 16384,
    }
    spills = changes.pop("spills", 0)
    return Build(
        "ops.linear_cross_entropy.engines.logits.softmax_triton",
        "_softmax_gradient_kernel",
        arguments | changes,
        warps=32 if changes.get("BLOCK", 16384) == 16384 else 16,
        spills=spills,
        fuses=not changes.get("SOFTCAP"),
    )


_CHAIN = {"bias_B_ptr": F32, "scale_ptr": F32, "SOFTCAP": 30.0, "BLOCK": 4096}
_CHAINED = {**_CHAIN, "lse_coef_C_ptr": F32, "grad_dot_logit_C_ptr": F32, "class_weight_B_ptr": F32}
_SMOOTHED = {"smoothing_coef_C_ptr": F32, "smooth_nll_C_ptr": F32, **_CHAINED}
_SOFT = {
    **dict.fromkeys(("soft_target_coef_C_ptr", "soft_mass_C_ptr", "soft_nll_C_ptr", "soft_CB_ptr"), F32),
    **_CHAINED,
}
_LOG_PROBS = {**_CHAIN, "mean_C_ptr": F32, "argmax_C_ptr": "*i64", "SECOND_READ": True}


BUILDS = {
    "softmax": _softmax("*bf16"),
    "softmax, float32": _softmax("*fp32"),
    "softmax, smoothed, with all options": _softmax("*bf16", **_SMOOTHED),
    "softmax, probabilities, with all options": _softmax("*bf16", **_SOFT),
    "softmax, short rows": _softmax("*bf16", BLOCK=4096),
    "softmax, statistics": _softmax(None, spills=4),
    "softmax, statistics of probabilities": _softmax(None, **_SOFT, SECOND_READ=True),
    "softmax, gradient": _softmax("*bf16", TAKE_STATISTICS=False),
    "softmax, gradient in float32": _softmax("*fp32", TAKE_STATISTICS=False, nll_C_ptr=None),
    "softmax, log-probabilities": _softmax(None, **_LOG_PROBS, spills=32),
    "softmax, gradient of entropy": _softmax("*bf16", TAKE_STATISTICS=False, entropy_coef_C_ptr=F32,
    **_CHAIN),
    "scale": Build(
        "core.kernels.triton_helpers", "_scale_kernel",
        {"tensor_ptr": F32, "other_ptr": None, "factor_ptr": F32, "second_ptr": F32, "out_ptr": "*bf16",
         "other_out_ptr": None, "count": I32, "other_count": I32, "IN_PLACE": False, "BLOCK": 4096}, warps=8,
    ),
    "scale, in place": Build(
        "core.kernels.triton_helpers", "_scale_kernel",
        {**dict.fromkeys(("tensor_ptr", "other_ptr", "out_ptr", "other_out_ptr"), "*bf16"), "factor_ptr": F32,
         "second_ptr": None, "count": "i64", "other_count": "i64", "IN_PLACE": True, "BLOCK": 4096}, warps=8,
    ),
    "factor of few tokens": Build(
        "ops.linear_cross_entropy.engines.logits.one_product",
        "_apply_factor_kernel",
        {
            **dict.fromkeys(("x_ND_ptr", "scaled_ND_ptr", "dx_ND_ptr"), BF16),
            **dict.fromkeys(("factor_ptr", "sum_ND_ptr"), F32),
            "ignored_N_ptr": "*i1",
            **dict.fromkeys(("x_stride", "D"), I32),
            "share": "fp32",
            "BLOCK": 4096,
        },
        warps=4,
    ),
}  # fmt: skip
LEFT_OUT = dict.fromkeys(
    TARGETS,
    (
        "softmax, float32",
        "softmax, statistics",
        "softmax, statistics of probabilities",
        "softmax, gradient",
        "softmax, gradient in float32",
    ),
)
