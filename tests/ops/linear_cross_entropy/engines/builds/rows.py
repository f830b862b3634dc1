"""Builds of the kernels of rows: their order, their loss, and what ranks exchange of it."""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import BF16, F32, I32, I32_PTR, I64, Build

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
        "one",
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


def _results(names: str, absent: str, **changes: Any) -> Build:
    arguments = {
        "ignored_M_ptr": "*i1",
        **{f"{name}_ptr": F32 for name in names.split()},
        **{f"{name}_ptr": None for name in absent.split()},
    }
    arguments |= {"N": I32, "BLOCK": 512} | changes
    return Build("ops.linear_cross_entropy.engines.row_results_triton", "_results_kernel", arguments, 4)


def _log_prob_coefs(**changes: Any) -> Build:
    arguments = {
        **{"ignored_M_ptr": "*i1", "invalid_target_M_ptr": "*i1", "row_M_ptr": None, "mean_M_ptr": F32},
        **{"grad_log_prob_N_ptr": F32, "grad_entropy_N_ptr": None, "grad_lse_N_ptr": None},
        **{"target_coef_M_ptr": F32, "softmax_coef_M_ptr": None, "entropy_coef_M_ptr": None, "M": I32},
        **dict.fromkeys(("log_prob_stride", "entropy_stride", "lse_stride"), 1),
        "BLOCK": 512,
    }
    module = "ops.linear_cross_entropy.engines.row_results_triton"
    return Build(module, "_log_prob_coefs_kernel", arguments | changes, 4)


_ALL_LOG_PROBS = {
    **{"row_M_ptr": I64, "grad_log_prob_N_ptr": BF16},
    **dict.fromkeys(
        ("grad_entropy_N_ptr", "grad_lse_N_ptr", "softmax_coef_M_ptr", "entropy_coef_M_ptr"), F32
    ),
    **dict.fromkeys(("log_prob_stride", "entropy_stride", "lse_stride"), I32),
}
_MEAN = {"target_weight_N_ptr": F32, **_IGNORED, "denominator_ptr": F32, "factor_ptr": F32}


BUILDS = {
    "row vectors": _row_vectors(),
    "row vectors, all": _row_vectors(**_ALL_VECTORS, one_ptr=F32),
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
    "results, losses": _results(
        "max_M sum_M loss_M max_N sum_N loss_N",
        "invalid_target_M target_logit_M nll_M mean_M argmax_M mean_N log_prob_N entropy_N lse_N argmax_N",
        place_N_ptr=I64,
    ),
    "results, log-probabilities": _results(
        "max_M sum_M target_logit_M nll_M mean_M max_N sum_N mean_N log_prob_N entropy_N lse_N",
        "place_N loss_M loss_N", invalid_target_M_ptr="*i1", argmax_M_ptr=I64, argmax_N_ptr=I64,
    ),
    "log-probability coefficients": _log_prob_coefs(),
    "log-probability coefficients, all": _log_prob_coefs(**_ALL_LOG_PROBS),
    "rows in order": Build(
        "ops.linear_cross_entropy.engines.gemm.counted_rows_triton", "_order_rows_kernel",
        {"label_N_ptr": I64, "row_N_ptr": I64, "place_N_ptr": I64, "count_ptr": I32_PTR,
         **dict.fromkeys(("N", "label_stride", "ignore_index"), I32), "BLOCK": 1024, "WIDTH": 4096},
        warps=8,
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
}  # fmt: skip
LEFT_OUT: dict[int, tuple[str, ...]] = {}
