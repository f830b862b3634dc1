"""What the modules beside it say of a kernel that is compiled ahead of time."""

from typing import Any, NamedTuple

TARGETS = (80, 90)

F32, I32, I32_PTR, BF16, I64 = "*fp32", "i32", "*i32", "*bf16", "*i64"
COUNTED = {"count_ptr": I32_PTR, "first_place": I32}
"""What tells a kernel how many rows of its chunk count."""
ROUNDING = ("factor_ptr", "class_weight_V_ptr", "smoothing_row_D_ptr")
"""A kernel rounds the last of several products with these."""
ONLY = ("first_V_ptr", "low_CP_ptr")
"""A kernel of the only product gets the places of targets, and memory for their bits."""


class Build(NamedTuple):
    module: str
    kernel: str
    arguments: dict[str, Any]
    """By name: a Triton type, or the value of a constexpr (None: a pointer that is not there)."""
    warps: int
    stages: int = 3
    targets: tuple[int, ...] = TARGETS
    spills: int = 0
    """Bytes a thread may put aside; only where many options meet."""
    fuses: bool = True
    """Whether it is launched with fused multiply-adds."""


TWO_TERMS = {"x_CR": "tensordesc<bf16[128, 64]>", "weight_BR": "tensordesc<bf16[256, 64]>"}
TILTED = {"softmax_coef_C_ptr": F32, "entropy_coef_C_ptr": F32, "GUARDED": True}
FOUND = {"mean_ptr": F32, "max_ptr": F32, "argmax_ptr": I32_PTR}
