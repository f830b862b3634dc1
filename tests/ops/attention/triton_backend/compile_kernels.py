"""Compiles every Triton kernel of attention ahead of time, without a GPU; prints what ptxas says:

    python -m tests.ops.attention.triton_backend.compile_kernels

one JSON object a line. TRITON_INTERPRET must not be set: it would turn the kernels into Python
functions.
"""

import importlib
import math
import re
from typing import Any

from tests.ops.attention.triton_backend.builds import BUILDS, F32, STRIDES, Build
from tests.support.ahead_of_time import compiled, print_all

# Bytes a block may have. For 80 what consumer cards of its generation have: an A100 takes the same
# tiles.
SHARED = dict.fromkeys((80, 86, 89, 120), 99 << 10) | dict.fromkeys((90, 100, 103), 227 << 10)
BYTES = {None: 0, "*bf16": 2, "*fp32": 4, "*fp64": 8}


def _given(build: Build, kernel: str, capability: int) -> dict[str, Any]:
    tensor = "*bf16" if build.half else F32
    names = (
        *("query", "key", "value", "grad_output", "out", "low"),
        *("grad_query", "grad_key", "grad_value", "query_sum"),
    )
    absent = (
        *("bias", "first", "end", "row_key", "column_key", "row_first", "row_end", "bias_sum"),
        *("weight", "grad_scores", "grad_z", "transposed_bias"),
    )
    given = {
        **dict.fromkeys((f"{name}_ptr" for name in names), tensor),
        "low_ptr": "*bf16" if build.half else None,
        **dict.fromkeys((f"{name}_strides" for name in names), STRIDES),
        **dict.fromkeys(f"{name}_ptr" for name in absent),
        **dict.fromkeys(("part_ptr", "part_sums_ptr"), F32),
        **dict.fromkeys(("statistics_ptr", "grad_logsumexp_ptr", "row_terms_ptr", "grad_bias_ptr"), F32),
        "query_sum_ptr": F32,
        **dict.fromkeys(
            (
                *("B", "H", "R", "M", "N", "K", "E", "F", "tiles", "limit", "rows", "row_programs"),
                *("first_group", "first_head", "groups", "first_key", "end_key", "tiles_m", "tiles_n"),
                *("batches", "own_batches", "own_heads", "heads", "steps", "parts", "keys"),
            ),
            "i32",
        ),
        **dict.fromkeys(("scale", "rescale"), "fp32"),
        "bias_strides": (0, 0, 0, 0),
        "grad_bias_strides": STRIDES,
        "transposed_bias_strides": STRIDES,
        "grad_scores_strides": ("i32", "i32", 1),
        "own": (1, "i32"),
        "ADD_BIAS": True,
        "loops": ("i32", 1),
        "tile_counts": ("i32", "i32"),
        "SOFTCAP": 0.0,
        "PRECISION": "bf16x6",
        "BASE_2": build.half and not build.arguments.get("bias_ptr"),
        "COLUMN_BIAS": False,
        "BIAS_STEP": 1,
        "lse_strides": ("i32", "i32", 1),
        "ADD": True,
        "SHARED": True,
        "BIAS_TRANSPOSED": False,
        "IN_PARTS": False,
        "CUT": bool(build.arguments.get("first_ptr")),
        "PIECES": 1,
        **build.arguments,
    }
    row_bias_bytes = 0 if given["COLUMN_BIAS"] else BYTES[given["bias_ptr"]]
    biased = row_bias_bytes, given["BIAS_TRANSPOSED"]
    return {**given, **_tile(kernel, given["PIECES"], build.half, build.features, capability, *biased)}


def _tile(
    kernel: str,
    pieces: int,
    half: bool,
    features: int,
    capability: int,
    row_bias_bytes: int,
    transposed: bool,
) -> dict[str, Any]:
    from lowtide.ops.attention.triton_backend.tile_sizes import find_tile

    if kernel == "dropout keys":
        return {"BLOCK": 1024, "warps": 4, "stages": 3}
    if kernel == "split":
        return {"BLOCK_M": 4096 // features, "BLOCK_F": features, "warps": 4, "stages": 3}
    if kernel == "merge parts":
        return {"warps": 4, "stages": 1}
    if kernel == "delta":
        return {"BLOCK_M": 64, "BLOCK_E": 128, "CUT_E": 8, "warps": 4, "stages": 3}
    is_delta = kernel.startswith("delta as ")
    kernel = re.sub(r" of \d pieces", "", kernel.removeprefix("delta as "))
    step = math.gcd(8, features) if half else 1
    sizes = features, features, SHARED[capability], row_bias_bytes
    tile = find_tile(kernel, pieces, half, *sizes, transposed=transposed, step=step)
    assert tile is not None
    return {**tile.constants, "warps": tile.warps, "stages": 1 if is_delta else tile.stages}


# Kernels whose builds take more than a second each.
SLOW = (
    *("forward_kernel", "query_gradient_kernel", "key_value_gradient_kernel", "confident_delta_kernel"),
    *("scores_kernel", "key_value_of_scores_kernel", "query_of_scores_kernel", "few_queries_kernel"),
    "whole_problem_gradient_kernel",
)
# Builds that another build covers (tests/support/ahead_of_time.py).
LEFT_OUT = {
    80: (
        "delta as query, float32, 64",
        "delta as scores of 3 pieces, 512, all",
        "query, half, 128",
        "key and value, half, 128",
        "key, half, 256",
        "value, half, 256",
        "value, half, keeping scores, 256",
        "key and value of 2 pieces, keeping scores, 64, all",
        "scores of 2 pieces, 300, all",
        "query of scores of 2 pieces, 300, all",
        "key and value of scores, half, 300, all",
        "key and value of scores of 2 pieces, 300, all",
        "key and value of 3 pieces, keeping scores, 64, all",
        "value of 3 pieces, keeping scores, 128",
        "query of scores of 3 pieces, 300, all",
    ),
    90: (
        "delta as query, float32, 64",
        "delta as key and value of 3 pieces, 64",
        "delta as value of 3 pieces, 128",
        "forward, half, 128",
        "forward, half, all",
        "query, half, 128",
        "key and value, half, 128",
        "key and value, half, all",
        "key and value, half, keeping scores, 64",
        "scores, half, 300, all",
        "scores of 2 pieces, 300, all",
        "scores of 3 pieces, 256",
        "query of scores, half, 64",
        "query of scores, half, 512",
        "query, float32, 64",
        "forward of 2 pieces, 64",
        "forward of 2 pieces, 128, all",
        "forward of 2 pieces, 256, all",
        "key and value of 2 pieces, keeping scores, 64",
        "key and value of 2 pieces, keeping scores, 128",
        "query of scores of 2 pieces, 128",
        "key and value of scores of 2 pieces, 128",
        "forward of 3 pieces, 128, all",
        "forward of 3 pieces, 256, all",
        "value of 3 pieces, keeping scores, 128",
        "key and value of scores of 3 pieces, 128",
    ),
}


def resources(name: str, build: Build, capability: int) -> dict[str, Any]:
    module = importlib.import_module(f"lowtide.ops.attention.triton_backend.kernels.{build.module}")
    kernel = getattr(module, build.kernel)
    given = _given(build, name.split(",")[0], capability)
    options = {"num_warps": given.pop("warps"), "num_stages": given.pop("stages")}
    found, ttgir = compiled(kernel, given, capability, options)
    widths = {int(width) for width in re.findall(r"swizzlingByteWidth = (\d+)", ttgir)}
    copies = ttgir.count("async_copy_global_to_local")
    return {**found, "warps": options["num_warps"], "row_bytes": sorted(widths), "copies": copies}


if __name__ == "__main__":
    print_all(BUILDS, resources)
