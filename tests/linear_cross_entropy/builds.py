"""How compile_kernels.py says what it builds, and what it builds of the kernels in Gluon."""

import re
from typing import Any, NamedTuple

import torch

TARGETS = (80, 90)

F32, I32, I32_PTR, BF16, I64 = "*fp32", "i32", "*i32", "*bf16", "*i64"
ROUNDING = ("factor_ptr", "class_weight_V_ptr", "spread_D_ptr")


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
    package: str = "lowtide.linear_cross_entropy"


DTYPES = {
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "i32": torch.int32,
    "u16": torch.uint16,
    "u8": torch.uint8,
}


def with_layouts(arguments: dict[str, Any]) -> dict[str, Any]:
    """Descriptors in Gluon say how their tiles lie in shared memory."""
    from lowtide.linear_cross_entropy import pipeline  # needs Triton

    def described(value: Any) -> Any:
        tile = re.fullmatch(r"tensordesc<(\w+)\[(\d+), (\d+)\]>", value) if isinstance(value, str) else None
        if tile is None:
            return value
        layout = pipeline.layout(int(tile[2]), int(tile[3]), pipeline.DTYPES[DTYPES[tile[1]]])
        return f"{value[:-1]},{layout!r}>"

    return {name: described(value) for name, value in arguments.items()}


def _add_product(low: str | None, **changes: Any) -> Build:
    arguments = {
        "exp_CV": "tensordesc<bf16[64, 64]>",
        "x_CD": "tensordesc<bf16[64, 256]>",
        "sum_VS": f"tensordesc<{'i32' if low else 'fp32'}[64, 64]>",
        "low_VP": low and f"tensordesc<{low}[64, 64]>",
        **dict.fromkeys(ROUNDING),
        **dict.fromkeys(("C", "D", "V"), I32),
        "PARTS": 2 if low else 4,
        "TOGETHER": 8,
        "PROGRAMS": 132,
        "STAGES": 4,
        "REGISTERS": (232, 40),
    }
    spills = changes.pop("spills", 0)
    kernel = "_add_product_pipelined_kernel"
    return Build("sum_pipeline", kernel, arguments | changes, warps=4, targets=(90,), spills=spills)


_LAST = {"ADD": True, **dict.fromkeys(ROUNDING, F32), "spills": 8}
PIPELINED = {
    "pipelined, float32, first product": _add_product(None, ADD=False),
    "pipelined, float32, another product": _add_product(None, ADD=True),
    "pipelined, 24 bits, first product": _add_product("u16", ADD=False),
    "pipelined, 24 bits, another product": _add_product("u16", ADD=True),
    "pipelined, 24 bits, the last product": _add_product("u16", **_LAST),
    "pipelined, 20 bits, first product": _add_product("u8", ADD=False),
    "pipelined, 20 bits, another product": _add_product("u8", ADD=True),
    "pipelined, 20 bits, the last product": _add_product("u8", **_LAST),
}
PIPELINED_LEFT_OUT = (
    "pipelined, float32, first product",
    "pipelined, 24 bits, first product",
    "pipelined, 24 bits, another product",
    "pipelined, 24 bits, the last product",
    "pipelined, 20 bits, first product",
    "pipelined, 20 bits, another product",
)
