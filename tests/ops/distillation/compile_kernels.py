"""Compiles the kernels of distillation ahead of time, without a GPU; prints what ptxas says:

    python -m tests.ops.distillation.compile_kernels

one JSON object a line. TRITON_INTERPRET must not be set.
"""

from typing import Any

from tests.ops.linear_cross_entropy.engines.builds.build import F32, I32, TARGETS, Build
from tests.ops.linear_cross_entropy.engines.compile_kernels import resources
from tests.support.ahead_of_time import print_all


def _build(kernel: str, pointers: str, numbers: str, changes: dict[str, Any]) -> Build:
    arguments = {
        **{f"{name}_ptr": None if "bias" in name else F32 for name in pointers.split()},
        **dict.fromkeys(numbers.split(), I32),
        **dict.fromkeys(("scale", "beta"), "fp32"),
        "BLOCK": 8192,
    }
    return Build("ops.distillation.softmax_triton", kernel, arguments | changes, warps=16)


def _statistics(**changes: Any) -> Build:
    return _build(
        "_statistics_kernel",
        "own_CV other_CV own_bias_V other_bias_V own_max_C own_sum_C other_max_C other_sum_C log_ratio_C "
        "mean_C loss_C",
        "V own_stride other_stride",
        {"OWN_CAP": 0.0, "OTHER_CAP": 0.0, "JENSEN_SHANNON": False, "SUMS": True} | changes,
    )


def _gradient(**changes: Any) -> Build:
    return _build(
        "_gradient_kernel",
        "student_CB teacher_CB student_bias_B teacher_bias_B student_max_C student_sum_C teacher_max_C "
        "teacher_sum_C log_ratio_C mean_C coef_C grad_CB",
        "B student_stride teacher_stride grad_stride",
        {"grad_CB_ptr": "*bf16", "STUDENT_CAP": 0.0, "TEACHER_CAP": 0.0, "FORWARD": False, "REVERSE": False}
        | changes,
    )


_BENT = {"BLOCK": 4096, "own_bias_V_ptr": F32, "other_bias_V_ptr": F32, "OWN_CAP": 30.0, "OTHER_CAP": 30.0}
_BENT_GRADIENT = {
    "BLOCK": 4096,
    "student_bias_B_ptr": F32,
    "teacher_bias_B_ptr": F32,
    "STUDENT_CAP": 30.0,
    "TEACHER_CAP": 30.0,
}
BUILDS = {
    "statistics": _statistics(),
    "statistics, with all options": _statistics(**_BENT),
    "statistics, Jensen-Shannon": _statistics(JENSEN_SHANNON=True),
    "statistics, Jensen-Shannon, with all options": _statistics(JENSEN_SHANNON=True, **_BENT),
    "statistics, Jensen-Shannon, of given sums": _statistics(JENSEN_SHANNON=True, SUMS=False),
    "gradient, forward": _gradient(FORWARD=True),
    "gradient, forward, float32": _gradient(FORWARD=True, grad_CB_ptr=F32),
    "gradient, reverse": _gradient(REVERSE=True),
    "gradient, Jensen-Shannon": _gradient(),
    "gradient, Jensen-Shannon, with all options": _gradient(**_BENT_GRADIENT),
}
# Builds that another build covers (tests/support/ahead_of_time.py).
LEFT_OUT = dict.fromkeys(
    TARGETS, ("statistics", "statistics, with all options", "gradient, forward, float32")
)

if __name__ == "__main__":
    print_all(BUILDS, resources)
