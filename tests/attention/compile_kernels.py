"""Compiles every Triton kernel of attention ahead of time, without a GPU, and prints what ptxas says of it:

    python -m tests.attention.compile_kernels

one JSON object a line. TRITON_INTERPRET must not be set: it would turn the kernels into Python functions.
"""

import importlib
import json
import re
from typing import Any, NamedTuple

from tests.ahead_of_time import assembled

TARGETS = (80, 90)
# Bytes a block may have: what consumer cards of the older generation have; and an H100.
SHARED = {80: 99 << 10, 90: 227 << 10}
F32, I32_PTR = "*fp32", "*i32"
STRIDES = ("i32", "i32", "i32", 1)


class Build(NamedTuple):
    module: str
    kernel: str
    half: bool
    features: int
    arguments: dict[str, Any]
    """By name: a Triton type, the value of a constexpr (None: a pointer that is not there), or a tuple."""
    targets: tuple[int, ...] = TARGETS
    spills: int = 0
    """Bytes a thread may put aside."""


MASKED = {"first_ptr": I32_PTR, "end_ptr": I32_PTR, "row_first_ptr": I32_PTR, "row_end_ptr": I32_PTR}
BIASED = {"bias_ptr": F32, "bias_strides": ("i32", "i32", "i32", 1)}
DROPPED = {"row_key_ptr": I32_PTR, "column_key_ptr": I32_PTR}
PIECES = {
    "ptrs": (F32,) * 3,
    "pieces_ptrs": ("*i16",) * 3,
    "strides": (STRIDES,) * 3,
    "shapes": (("i32",) * 4,) * 3,
    "COUNT": 3,
}
ALL = {**MASKED, **BIASED, **DROPPED, "SOFTCAP": 30.0}
KERNELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "forward": ("forward_kernels", "forward_kernel", ()),
    "query": ("backward_kernels", "query_gradient_kernel", ()),
    "key and value": ("backward_kernels", "key_value_gradient_kernel", ()),
    "key": ("backward_kernels", "key_value_gradient_kernel", ("grad_value_ptr",)),
    "value": ("backward_kernels", "key_value_gradient_kernel", ("grad_key_ptr",)),
    "bias": ("bias_kernel", "bias_gradient_kernel", ()),
}
# With any of Triton 3.6 to 3.9.
SPILLS = {
    "forward, half, 512": 32,
    "forward of 2 pieces, 128, all": 96,
    "forward of 2 pieces, 256, all": 320,
    "forward of 2 pieces, 512": 160,
    "forward of 3 pieces, 128, all": 96,
    "forward of 3 pieces, 256, all": 512,
    "forward of 3 pieces, 512": 160,
    "query, half, 512": 2688,
    "query, float32, 64": 256,
    "query, float32, 128": 128,
    "key and value, half, 128": 256,
    "key and value, half, all": 896,
    "key and value, float32, 64": 1152,
    "key, half, 512": 4096,
    "key, float32, 128": 128,
    "value, half, 512": 576,
    "value, float32, 128": 448,
    "bias, half, 128": 32,
    "bias, half, 256": 64,
    "bias, half, 512": 64,
    "bias, float32, 64": 192,
    "bias, float32, 128": 96,
}


def _given(build: Build, kernel: str, capability: int) -> dict[str, Any]:
    tensor = "*bf16" if build.half else F32
    names = ("query", "key", "value", "upstream", "out", "grad_query", "grad_key", "grad_value")
    absent = ("bias", "first", "end", "row_key", "column_key", "row_first", "row_end", "bias_sum")
    given = {
        **dict.fromkeys((f"{name}_ptr" for name in names), tensor),
        **dict.fromkeys((f"{name}_strides" for name in names), STRIDES),
        **dict.fromkeys(f"{name}_ptr" for name in absent),
        **dict.fromkeys(("statistics_ptr", "logsumexp_upstream_ptr", "rows_ptr", "part_ptr"), F32),
        **dict.fromkeys(
            ("H", "R", "M", "N", "K", "E", "F", "tiles", "parts", "limit", "rows", "row_programs"), "i32"
        ),
        **dict.fromkeys(("scale", "rescale"), "fp32"),
        "bias_strides": (0, 0, 0, 0),
        "part_strides": ("i32", "i32", "i32", "i32", 1),
        "own_sizes": (1, "i32", "i32"),
        "loop_sizes": ("i32", 1, 1),
        "SOFTCAP": 0.0,
        "PRECISION": "bf16x6",
        "BASE_2": not build.arguments.get("bias_ptr"),
        "COLUMN_BIAS": False,
        "FULL_N": True,
        "PIECES": 1,
        **build.arguments,
    }
    row_bias = given["bias_ptr"] is not None and not given["COLUMN_BIAS"]
    return {**given, **_blocks(kernel, build.half, build.features, capability, row_bias)}


def _blocks(kernel: str, half: bool, features: int, capability: int, row_bias: bool) -> dict[str, Any]:
    from lowtide.attention.blocks import blocks, cut

    if kernel == "dropout keys":
        return {"BLOCK": 1024, "warps": 4, "stages": 3}
    if kernel == "pieces":
        return {"BLOCK_M": 4096 // features, "BLOCK_F": features, "warps": 4, "stages": 3}
    if kernel == "rows":
        return {"BLOCK_M": 64, "BLOCK_E": 128, "warps": 4, "stages": 3}
    size = blocks(kernel, half, features, SHARED[capability], row_bias)
    assert size is not None
    given = cut(features, features, size)
    return {**given, "warps": given.pop("num_warps"), "stages": given.pop("num_stages")}


def _builds() -> dict[str, Build]:
    builds = {
        "rows": Build("backward_kernels", "rows_kernel", True, 128, {"lse_strides": ("i32", "i32", 1)}),
        "dropout keys": Build(
            "dropout_kernel", "dropout_keys_kernel", True, 1, {**DROPPED, "seed_ptr": "*i64"}
        ),
        "pieces": Build("pieces", "pieces_kernel", False, 64, PIECES),
    }
    for name, (module, kernel, absent) in KERNELS.items():
        own = dict.fromkeys(absent) | (BIASED if name == "bias" else {})
        together = name == "key and value"
        for label, half, features, arguments, targets in (
            ("half, 128", True, 128, own, TARGETS),
            ("half, 256", True, 256, own, (80,)),
            ("half, 512", True, 512, own, (90,)),
            ("half, all", True, 64, {**ALL, **own}, (90,)),
            ("float32, 64", False, 64, own, TARGETS),
            ("float32, 128", False, 128, own, (90,)),
        ):
            if name == "forward" and not half:
                continue  # in pieces, below
            if together != (features <= (128 if half else 64)) and name in ("key and value", "key", "value"):
                continue  # these gradients have one kernel for few features, two for many
            spills = SPILLS.get(f"{name}, {label}", 0)
            build = Build(module, kernel, half, features, arguments, targets, spills)
            builds[f"{name}, {label}"] = build
    for count in (2, 3):
        own = {"PIECES": count, "out_ptr": F32}
        for operand in ("query", "key", "value"):
            own |= {f"{operand}_ptr": "*bf16", f"{operand}_strides": (*STRIDES, "i32")}
        for label, features, arguments, targets in (
            ("64", 64, own, (90,)),
            ("64, all", 64, {**ALL, **own}, (90,)),
            ("128, all", 128, {**ALL, **own}, TARGETS),
            ("256, all", 256, {**ALL, **own}, (90,)),
            ("512", 512, own, (90,)),
        ):
            name = f"forward of {count} pieces, {label}"
            builds[name] = Build(
                "forward_kernels", "forward_kernel", False, features, arguments, targets, SPILLS.get(name, 0)
            )
    column = {"bias_ptr": "*bf16", "bias_strides": ("i32", "i32", "i32", 1), "COLUMN_BIAS": True}
    builds["forward, half, few features"] = Build(
        "forward_kernels", "forward_kernel", True, 24, column, (90,)
    )
    return builds


BUILDS = _builds()


def resources(name: str, build: Build, capability: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"lowtide.attention.{build.module}"), build.kernel)
    given = _given(build, name.split(",")[0], capability)
    options = {"num_warps": given.pop("warps"), "num_stages": given.pop("stages")}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []

    def place(path: tuple[int, ...], value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(place((*path, at), each) for at, each in enumerate(value))
        if not isinstance(value, str) or value[0] not in "*if":
            constants[path] = value
            return "constexpr"
        if value[0] in "*i":
            aligned.append(path)  # as Triton specialises them where they are
        return value

    for at, argument in enumerate(kernel.arg_names):
        signature[argument] = place((at,), given[argument])
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    widths = sorted(
        {int(width) for width in re.findall(r"swizzlingByteWidth = (\d+)", compiled.asm["ttgir"])}
    )
    known = {"shared": compiled.metadata.shared, "warps": options["num_warps"], "row_bytes": widths}
    return {**known, **assembled(compiled.asm["ptx"], capability)}


def main() -> None:
    for name, build in BUILDS.items():
        for capability in build.targets:
            try:
                result: dict[str, Any] = resources(name, build, capability)
            except Exception as error:  # said in its test, so that one kernel does not hide the others
                result = {"error": f"{type(error).__name__}: {error}"}
            print(json.dumps({"name": name, "capability": capability} | result), flush=True)


if __name__ == "__main__":
    main()
