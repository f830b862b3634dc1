"""Compiles every Triton kernel of the op ahead of time, without a GPU; prints what ptxas says:

    python -m tests.ops.linear_cross_entropy.engines.compile_kernels

one JSON object a line. TRITON_INTERPRET must not be set: it would turn the kernels into Python
functions.
"""

import importlib
from typing import Any

from tests.ops.linear_cross_entropy.engines.builds import (
    BF16,
    COUNTED,
    F32,
    I32,
    I32_PTR,
    I64,
    PIPELINED,
    PIPELINED_LEFT_OUT,
    ROUNDING,
    Build,
)
from tests.support.ahead_of_time import compiled, print_all


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
        "ops.linear_cross_entropy.engines.exponentials.gemm_triton",
        "exponentials_kernel",
        arguments | changes,
        8,
        stages,
        (90,),
        spills,
    )


_BENT = {"bias_B_ptr": F32, "scale_ptr": F32, "SOFTCAP": 30.0}
_TWO_TERMS = {"x_CR": "tensordesc<bf16[128, 64]>", "weight_BR": "tensordesc<bf16[256, 64]>"}
_GRADIENT = {"factor_C_ptr": F32, "GUARDED": True, "sum_ptr": None}
_TILTED = {"softmax_coef_C_ptr": F32, "entropy_coef_C_ptr": F32, "GUARDED": True}


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


_FOUND = {"mean_ptr": F32, "max_ptr": F32, "argmax_ptr": I32_PTR}


def _rows(kernel: str, module: str = "row_kernels", warps: int = 4, **arguments: Any) -> Build:
    return Build(f"ops.linear_cross_entropy.engines.weight_gradient.{module}", kernel, arguments, warps)


def _target_rows(kernel: str, warps: int = 2, **arguments: Any) -> Build:
    return _rows(kernel, "target_rows", warps, **arguments)


_IGNORED = {"ignored_N_ptr": "*i1"}


def _row_loss(kernel: str, warps: int, block: int, arguments: dict[str, Any], **changes: Any) -> Build:
    arguments = arguments | {"N": I32, "BLOCK": block} | changes
    return Build("ops.linear_cross_entropy.engines.row_loss_triton", kernel, arguments, warps)


def _row_vectors(**changes: Any) -> Build:
    absent = (
        "class_weight_V",
        "total_weight",
        "row_weight_N",
        "upstream_N",
        "smoothing_coef_N",
        "lse_coef_N",
        "normalizer",
        "denominator",
        "factor",
    )
    arguments = {
        **{"label_N_ptr": I64, "target_N_ptr": I64, **_IGNORED, "invalid_target_N_ptr": None},
        **dict.fromkeys(("target_weight_N_ptr", "softmax_coef_N_ptr", "target_coef_N_ptr"), F32),
        **dict.fromkeys(f"{name}_ptr" for name in absent),
        **{"V": I32, "ignore_index": I32},
        **dict.fromkeys(("label_stride", "row_weight_stride", "upstream_stride"), 1),
        **dict.fromkeys(("target_share", "smoothing_share", "lse_share"), "fp32"),
    }
    of_mean = changes.get("factor_ptr") is not None  # the kernel of a mean runs as a single program
    return _row_loss("_row_vectors_kernel", *((16, 4096) if of_mean else (4, 512)), arguments, **changes)


_ALL_VECTORS = {
    **{
        "label_N_ptr": "*i32",
        "invalid_target_N_ptr": "*i1",
        "upstream_N_ptr": BF16,
        "row_weight_N_ptr": BF16,
    },
    **dict.fromkeys(("class_weight_V_ptr", "total_weight_ptr"), F32),
    **dict.fromkeys(("smoothing_coef_N_ptr", "lse_coef_N_ptr"), F32),
    **dict.fromkeys(("label_stride", "row_weight_stride", "upstream_stride"), I32),
}


def _loss(**changes: Any) -> Build:
    absent = ("smooth_nll_N", "target_logit_N", "row_weight_N", "loss_N")
    arguments = {
        **_IGNORED,
        **dict.fromkeys(("target_weight_N_ptr", "nll_N_ptr", "max_N_ptr", "sum_N_ptr"), F32),
        **dict.fromkeys(f"{name}_ptr" for name in absent),
        **{"denominator_ptr": F32, "loss_ptr": F32, "row_weight_stride": 1, "Z_LOSS": False},
        **dict.fromkeys(("target_share", "smoothing_share", "z_loss"), "fp32"),
    }
    block, warps = changes.pop("BLOCK", 4096), changes.pop("warps", 16)
    return _row_loss("_loss_kernel", warps, block, arguments, **changes)


_ALL_LOSSES = {
    **dict.fromkeys(("smooth_nll_N_ptr", "target_logit_N_ptr", "row_weight_N_ptr"), F32),
    "row_weight_stride": I32,
    "Z_LOSS": True,
}
_MEAN = {"target_weight_N_ptr": F32, **_IGNORED, "denominator_ptr": F32, "factor_ptr": F32}


def _add_product(**changes: Any) -> Build:
    arguments = {
        "exp_CV": "tensordesc<bf16[64, 128]>",
        "x_CD": "tensordesc<bf16[64, 256]>",
        "pair_VP_ptr": "*i32",
        "low_VP_ptr": "*u16",
        **dict.fromkeys(ROUNDING, None),
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


_INPUT_GRADIENT = "ops.linear_cross_entropy.engines.exponentials.input_gradient"
_SPLIT = {"PROGRAMS": 132, "FEWEST": 1024, "BLOCK_C": 128, "BLOCK_D": 256}


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
        **dict.fromkeys(("weight_stride", "out_stride", "C", "D", "V", "most_parts"), I32),
        **_SPLIT,
        "GROUP": 8,
        "BLOCK_V": 64,
    }
    return Build(_INPUT_GRADIENT, "_input_gradient_product_kernel", arguments | changes, 8, 4, (90,))


def _summed_parts(**changes: Any) -> Build:
    arguments = {**_input_gradient().arguments, "part_ptr": F32, "ROWS": 32} | changes
    for name in ("exp_CV", "weight_VD", "GROUP", "BLOCK_V"):
        del arguments[name]
    return Build(_INPUT_GRADIENT, "_sum_parts_kernel", arguments, 8)


_REDUCING = {"HEIGHT": 128, "BLOCK_C": 32, "BLOCK_T": 128}


def _sums(**changes: Any) -> Build:
    arguments = {"partials_TC_ptr": F32, "out_C_ptr": F32, "marks_ptr": I32_PTR, "T": I32, "C": I32}
    arguments |= COUNTED
    module = "ops.linear_cross_entropy.engines.exponentials.recompute"
    return Build(module, "_sum_kernel", {**arguments, **_REDUCING, **changes}, warps=8)


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
        {"tensor_ptr": F32, "factor_ptr": F32, "second_ptr": F32, "out_ptr": "*bf16", "count": I32,
         "IN_PLACE": False, "BLOCK": 4096}, warps=8,
    ),
    "scale, in place": Build(
        "core.kernels.triton_helpers", "_scale_kernel",
        {"tensor_ptr": "*bf16", "factor_ptr": F32, "second_ptr": None, "out_ptr": "*bf16", "count": "i64",
         "IN_PLACE": True, "BLOCK": 4096}, warps=8,
    ),
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
    "exponentials, log-probabilities": _exponentials(exp_CB=None, STORE=False, **_FOUND),
    "exponentials, log-probabilities, all": _exponentials(exp_CB=None, STORE=False, **_FOUND, **_BENT,
        spills=72),
    "exponentials, gradient of entropy": _exponentials(**_TILTED, spills=20),
    "exponentials, gradient of entropy, all": _exponentials(
        **_TILTED, **_BENT, MASKED=True, grad_dot_logit_ptr=F32, spills=544
    ),
    "exponentials, two terms": _exponentials(**_TWO_TERMS),
    "exponentials, two terms, all": _exponentials(
        **_TWO_TERMS, **_BENT, MASKED=True, grad_dot_logit_ptr=F32, spills=600
    ),
    "exponentials, two terms, gradient of entropy": _exponentials(**_TWO_TERMS, **_TILTED, spills=20),
    "distances": _distances(),
    "distances, sums": _distances(distance_CB=None, STORE=False),
    "distances, strided": _distances(soft_stride=I32, spills=256),
    "distances, two terms": _distances(**_TWO_TERMS),
    "distances, all": _distances(
        **_TWO_TERMS, bias_B_ptr=F32, scale_ptr=F32, class_weight_B_ptr=F32, SMOOTHED=True, spills=96
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
    "row vectors": _row_vectors(),
    "row vectors, all": _row_vectors(**_ALL_VECTORS),
    "row vectors, upstream": _row_vectors(
        **_ALL_VECTORS | dict.fromkeys(
            ("target_N_ptr", "ignored_N_ptr", "invalid_target_N_ptr", "target_weight_N_ptr")
        )
    ),
    "row vectors, mean": _row_vectors(denominator_ptr=F32, factor_ptr=F32),
    "row vectors, all, normaliser": _row_vectors(
        **_ALL_VECTORS, normalizer_ptr=F32, denominator_ptr=F32, factor_ptr=F32
    ),
    "mean": _row_loss("_mean_kernel", 16, 4096, _MEAN, normalizer_ptr=None),
    "mean, normaliser": _row_loss("_mean_kernel", 16, 4096, _MEAN, normalizer_ptr=F32),
    "loss": _loss(),
    "loss, all": _loss(**_ALL_LOSSES),
    "loss, each row": _loss(
        **_ALL_LOSSES, loss_N_ptr=F32, loss_ptr=None, denominator_ptr=None, BLOCK=512, warps=4
    ),
    "target logits": _rows(
        "_target_logits_kernel", x_CD_ptr=BF16, weight_VD_ptr=BF16, target_C_ptr=I64, ignored_C_ptr="*i1",
        logit_C_ptr=F32, reference_C_ptr=F32, marks_ptr=I32_PTR, **COUNTED, x_stride=I32, weight_stride=I32,
        C=I32, D=I32, HEIGHT=128, BLOCK=1024,
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
    "rows in order": Build(
        "ops.linear_cross_entropy.engines.gemm.counted_rows_triton", "_order_rows_kernel",
        {"label_N_ptr": I64, "row_N_ptr": I64, "place_N_ptr": I64, "count_ptr": I32_PTR,
         **dict.fromkeys(("N", "label_stride", "ignore_index"), I32), "BLOCK": 1024, "WIDTH": 4096},
        warps=8,
    ),
    "rows of dX": _input_gradient(),
    "rows of dX, in float32, smoothing": _input_gradient(
        out_ptr=F32, smoothing_coef_C_ptr=F32, total_weight_D_ptr=F32
    ),
    "parts of rows of dX": Build(
        _INPUT_GRADIENT, "_parts_kernel",
        {"exp_CV": "tensordesc<bf16[128, 64]>", "weight_VD": "tensordesc<bf16[64, 256]>", "part_ptr": F32,
         **COUNTED, **dict.fromkeys(("C", "D", "V", "most_parts"), I32), **_SPLIT, "BLOCK_V": 64},
        8, 4, (90,),
    ),
    "summed parts of rows of dX": _summed_parts(),
    "summed parts of rows of dX, in float32, smoothing": _summed_parts(
        out_ptr=F32, smoothing_coef_C_ptr=F32, total_weight_D_ptr=F32
    ),
    "input gradient": _rows(
        "_input_gradient_kernel", product_CD_ptr=F32, weight_VD_ptr=BF16, target_C_ptr=I64,
        ignored_C_ptr="*i1", row_scale_C_ptr=F32, target_weight_coef_C_ptr=F32,
        smoothing_coef_C_ptr=F32, total_weight_D_ptr=F32, factor_ptr=F32, out_CD_ptr=BF16,
        weight_stride=I32, out_stride=I32, D=I32, BLOCK=1024,
    ),
    "target rows": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr=F32, low_VP_ptr=None, sum_TD_ptr=None,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, first_target=I32, V=I32,
        BLOCK_N=8, BLOCK=512,
    ),
    "target rows, few bits": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr="*i32", low_VP_ptr="*u8", sum_TD_ptr=None,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, first_target=I32, V=I32,
        BLOCK_N=8, BLOCK=512,
    ),
    "target rows, formed apart": _target_rows(
        "_add_target_rows_kernel", x_ptr=BF16, target_weight_coef_N_ptr=F32, factor_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, sum_VD_ptr=BF16, low_VP_ptr=None, sum_TD_ptr=F32,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, first_target=I32, V=I32,
        BLOCK_N=8, BLOCK=512,
    ),
    "round a block": _target_rows(
        "_round_block_kernel", warps=4, sum_BD_ptr=F32, x_ptr=BF16, target_weight_coef_N_ptr=F32,
        class_N_ptr=I32_PTR, order_N_ptr=I64, first_V_ptr=I32_PTR, class_weight_V_ptr=F32,
        smoothing_row_D_ptr=F32, factor_ptr=F32, out_VD_ptr=BF16,
        outer_stride=I32, inner_stride=I32, inner=I32, N=I32, D=I32, first_class=I32, BLOCK_N=16, BLOCK=512,
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
    "first references of ranks": Build(
        "ops.linear_cross_entropy.engines.excluded_part_stats_triton", "_first_references_kernel",
        {**dict.fromkeys(("logit_C_ptr", "sampled_C_ptr", "reference_C_ptr"), F32), "place_C_ptr": I64,
         "ignored_C_ptr": "*i1", "C": I32, "BLOCK_C": 128}, warps=4,
    ),
    "what ranks send": Build(
        "ops.linear_cross_entropy.engines.excluded_part_stats_triton", "_pack_kernel",
        {**dict.fromkeys((f"{name}_ptr" for name in (
            "max_C", "sum_C", "logit_C", "smooth_logit_C", "out_KC"
        )), F32), "place_C_ptr": I64, "ignored_C_ptr": "*i1", "C": I32, "BLOCK_C": 128}, warps=4,
    ),
    "merge of ranks": Build(
        "ops.linear_cross_entropy.engines.excluded_part_stats_triton", "_merge_kernel",
        {**dict.fromkeys((f"{name}_ptr" for name in (
            "parts_PKC", "own_KC", "total_weight", "max_C", "sum_C", "target_logit_C", "nll_C",
            "smooth_nll_C", "factor_C",
        )), F32), "ignored_C_ptr": "*i1", **dict.fromkeys(("P", "K", "C"), I32), "BLOCK_C": 128}, warps=4,
    ),
    "coefficients": Build(
        "ops.linear_cross_entropy.engines.exponentials.row_coefficients", "_coefficients_kernel",
        {**dict.fromkeys((f"{name}_C_ptr" for name in (
            "logit", "max", "sum", "softmax_coef", "target_coef", "lse_coef", "entropy_coef", "slope",
            "nll", "row_scale"
        )), F32), "target_weight_coef_ptr": F32, "row_C_ptr": I64, "ignored_C_ptr": "*i1",
         "partials_TC_ptr": F32, "marks_ptr": I32_PTR, "T": I32, "C": I32, **_REDUCING}, warps=8,
    ),
    "24 bits, first product": _add_product(ADD=False),
    "24 bits, another product": _add_product(ADD=True),
    "24 bits, the last product": _add_product(ADD=True, **dict.fromkeys(ROUNDING, F32)),
    "the only product": _add_product(ADD=False, factor_ptr=F32),
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
    **PIPELINED,
}  # fmt: skip
# Kernels whose builds take more than a second each.
SLOW = (
    *("exponentials_kernel", "_distances_kernel", "_distance_pipeline_kernel", "_add_product_kernel"),
    *("_add_product_pipelined_kernel", "_input_gradient_product_kernel", "_parts_kernel"),
)
# Builds that another build covers (tests/support/ahead_of_time.py).
_SOFTMAX = (
    "softmax, float32",
    "softmax, statistics",
    "softmax, statistics of probabilities",
    "softmax, gradient",
    "softmax, gradient in float32",
    "target rows",
)
LEFT_OUT = {
    80: _SOFTMAX,
    90: (
        *_SOFTMAX,
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
        "distances",
        "distances, sums",
        "distances, strided",
        "distances, two terms",
        "distances, gradient",
        "20 bits, first product",
        "20 bits, another product",
        "20 bits, rounded",
        "24 bits, another product",
        *PIPELINED_LEFT_OUT,
    ),
}


def resources(_: str, build: Build, capability: int) -> dict[str, int]:
    kernel = getattr(importlib.import_module(f"lowtide.{build.module}"), build.kernel)
    options = {
        "num_warps": build.warps,
        "num_stages": build.stages,
        "enable_fp_fusion": build.fuses,
    }
    return compiled(kernel, build.arguments, capability, options)[0]


if __name__ == "__main__":
    print_all(BUILDS, resources)
