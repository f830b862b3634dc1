"""Compiles every Triton kernel of attention ahead of time, without a GPU, and prints what ptxas says of it:

    python -m tests.attention.compile_kernels

one JSON object a line. TRITON_INTERPRET must not be set: it would turn the kernels into Python functions.
"""

import importlib
import json
from typing import Any, NamedTuple

from tests.linear_cross_entropy.compile_kernels import _assembled as assembled

TARGETS = (80, 90)
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
ALL = {**MASKED, **BIASED, **DROPPED, "SOFTCAP": 30.0}
KERNELS = {
    "forward": ("forward_kernels", "forward_kernel"),
    "query": ("backward_kernels", "query_gradient_kernel"),
    "key and value": ("backward_kernels", "key_value_gradient_kernel"),
    "bias": ("bias_kernel", "bias_gradient_kernel"),
}
# With any of Triton 3.6 to 3.9.
SPILLS = {
    "forward, half, 512": 32,
    "forward, float32, 64": 64,
    "query, half, 512": 192,
    "key and value, half, 128": 64,
    "key and value, half, 512": 384,
    "key and value, half, all": 320,
    "key and value, float32, 64": 96,
    "bias, half, 128": 96,
    "bias, half, 512": 320,
    "bias, float32, 64": 128,
}


def _given(kernel: str, half: bool, features: int, changes: dict[str, Any]) -> dict[str, Any]:
    tensor = "*bf16" if half else F32
    names = ("query", "key", "value", "upstream", "out", "grad_query", "grad_key", "grad_value")
    absent = ("bias", "first", "end", "row_key", "column_key", "row_first", "row_end", "bias_sum")
    given = {
        **dict.fromkeys((f"{name}_ptr" for name in names), tensor),
        **dict.fromkeys((f"{name}_strides" for name in names), STRIDES),
        **dict.fromkeys(f"{name}_ptr" for name in absent),
        **dict.fromkeys(("logsumexp_ptr", "logsumexp_upstream_ptr", "delta_ptr", "part_ptr"), F32),
        **dict.fromkeys(("H", "R", "M", "N", "K", "E", "tiles", "parts", "limit"), "i32"),
        **dict.fromkeys(("scale", "rescale"), "fp32"),
        "bias_strides": (0, 0, 0, 0),
        "part_strides": ("i32", "i32", "i32", "i32", 1),
        "own_sizes": (1, "i32", "i32"),
        "loop_sizes": ("i32", 1, 1),
        "SOFTCAP": 0.0,
        "PRECISION": "tf32x3",
        "FULL_N": True,
        **changes,
    }
    return {**given, **_blocks(kernel, half, features)}


def _blocks(kernel: str, half: bool, features: int) -> dict[str, Any]:
    from lowtide.attention.launch import backward_blocks, bias_blocks, cut, forward_blocks

    of_kernel = {"forward": forward_blocks, "bias": bias_blocks}
    blocks = of_kernel.get(kernel, backward_blocks)(half, features)
    (block_k, blocks_k), (block_e, blocks_e) = cut(features, blocks.K), cut(features, blocks.E)
    sizes = {"BLOCK_M": blocks.M, "BLOCK_N": blocks.N, "BLOCK_K": block_k, "BLOCK_E": block_e}
    return {
        **sizes, "BLOCKS_K": blocks_k, "BLOCKS_E": blocks_e, "warps": blocks.warps, "stages": blocks.stages
    }  # fmt: skip


def _builds() -> dict[str, Build]:
    builds = {
        "delta": Build("backward_kernels", "delta_kernel", True, 128, {"lse_strides": ("i32", "i32", 1)})
    }
    for name, (module, kernel) in KERNELS.items():
        own = BIASED if name == "bias" else {}
        for label, half, features, arguments, targets in (
            ("half, 128", True, 128, own, TARGETS),
            ("half, 512", True, 512, own, (90,)),
            ("half, all", True, 64, ALL, (90,)),
            ("float32, 64", False, 64, own, TARGETS),
        ):
            spills = SPILLS.get(f"{name}, {label}", 0)
            build = Build(module, kernel, half, features, arguments, targets, spills)
            builds[f"{name}, {label}"] = build
    return builds


BUILDS = _builds()


def resources(name: str, build: Build, capability: int) -> dict[str, int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"lowtide.attention.{build.module}"), build.kernel)
    given = _given(name.split(",")[0], build.half, build.features, build.arguments)
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
    known = {"shared": compiled.metadata.shared, "warps": options["num_warps"]}
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
