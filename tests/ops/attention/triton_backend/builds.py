"""What compile_kernels.py builds: each kernel of attention, with the options and sizes of features
that it has.
"""

from typing import Any, NamedTuple

TARGETS = (80, 90)
F32, I32_PTR = "*fp32", "*i32"
STRIDES = ("i32", "i32", "i32", 1)


class Build(NamedTuple):
    module: str
    """In triton_backend/kernels/."""
    kernel: str
    half: bool
    features: int
    arguments: dict[str, Any]
    """By name: a Triton type, the value of a constexpr (None: an absent pointer), or a tuple."""
    targets: tuple[int, ...] = TARGETS
    spills: int = 0
    """Bytes a thread may put aside."""


MASKED = {"first_ptr": I32_PTR, "end_ptr": I32_PTR, "row_first_ptr": I32_PTR, "row_end_ptr": I32_PTR}
BIASED = {"bias_ptr": F32, "bias_strides": ("i32", "i32", "i32", 1)}
OWN_BIAS = {**BIASED, "bias_ptr": "*bf16", "grad_bias_ptr": "*bf16"}
PADDED = {"bias_ptr": "*u8", "bias_strides": ("i32", 0, 0, 1), "COLUMN_BIAS": True, "BASE_2": True}
DROPPED = {"row_key_ptr": I32_PTR, "column_key_ptr": I32_PTR}
PIECES = {
    "ptrs": (F32,) * 3,
    "pieces_ptrs": ("*i16",) * 3,
    "strides": (STRIDES,) * 3,
    "shapes": (("i32",) * 4,) * 3,
    "COUNT": 3,
}
ALL = {**MASKED, **BIASED, **DROPPED, "SOFTCAP": 30.0}
OPERANDS = ("query", "key", "value", "grad_output")
# Operands that a kernel of pieces loads once, and splits itself, if all features are one block.
LOADED_ONCE = {
    "forward": ("query",),
    **dict.fromkeys(("key and value", "delta as key and value"), ("key", "value")),
}
VALUE = {"grad_value_ptr": "*bf16"}
KERNELS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "forward": ("forward", "forward_kernel", ()),
    "query": ("recompute", "query_gradient_kernel", ("grad_bias_ptr",)),
    "key and value": ("recompute", "key_value_gradient_kernel", ()),
    "key": ("recompute", "key_value_gradient_kernel", ("grad_value_ptr",)),
    "value": ("recompute", "key_value_gradient_kernel", ("grad_key_ptr",)),
    "query of scores": ("stored_scores", "query_of_scores_kernel", ()),
    "bias of scores": ("stored_scores", "bias_of_scores_kernel", ()),
    "key and value of scores": ("stored_scores", "key_value_of_scores_kernel", ("grad_value_ptr",)),
    "scores": ("stored_scores", "scores_kernel", ()),
    **dict.fromkeys(
        ("delta as key and value", "delta as value", "delta as query", "delta as scores"),
        ("confident_rows", "confident_delta_kernel", ()),
    ),
    "few queries": ("few_queries", "few_queries_kernel", ()),
    "problem forward": ("small_problems", "problem_forward_kernel", ()),
    "problem gradient": ("small_problems", "problem_gradient_kernel", ()),
    "wide problem gradient": ("small_problems", "problem_gradient_kernel", ()),
    "short bias": ("short_bias", "short_bias_gradient_kernel", ()),
    "whole problem": ("whole_problems", "whole_problem_gradient_kernel", ()),
}
# The bytes that these builds spill with any Triton from 3.6 to 3.9.
SPILLS = {
    "forward, half, 128, float64 bias": 320,
    "query, half, 128, float64 bias": 96,
    "forward, half, 512": 32,
    "forward of 2 pieces, 128, all": 96,
    "forward of 2 pieces, 256, all": 320,
    "forward of 3 pieces, 128, all": 96,
    "forward of 3 pieces, 256, all": 688,
    "forward of 2 pieces, 256, biased": 272,
    "forward of 3 pieces, 256, biased": 216,
    "query, float32, 64": 256,
    "query, half, own bias, 64": 64,
    "forward, half, padded, 72": 8,
    "key and value, half, padded, 72": 256,
    "key and value, half, 128": 256,
    "key and value, half, 72, of which Triton knows no divisor": 256,
    "key and value, half, all": 896,
    "key and value, half, 64, a transposed bias": 64,
    "key and value, half, in parts of the queries": 16,
    "key and value, half, keeping scores, 64": 672,
    "key and value, half, keeping scores, all": 768,
    "value, half, keeping scores, 256": 400,
    "scores, half, 300, all": 224,
    "scores of 3 pieces, 300, all": 168,
    "query of scores, half, 300, all": 288,
    "key and value of scores, half, 300, all": 128,
    "key and value of 2 pieces, keeping scores, 64": 288,
    "key and value of 2 pieces, keeping scores, 64, all": 864,
    "key and value of 2 pieces, keeping scores, 128": 384,
    "key and value of 3 pieces, keeping scores, 64": 352,
    "key and value of 3 pieces, keeping scores, 64, all": 1024,
    "value of 3 pieces, keeping scores, 128": 2560,
    "key and value of scores of 3 pieces, 300, all": 8,
    "key and value, half, keeping scores, 128": 2080,
    "delta as query, float32, 64": 72,
    "delta as value of 3 pieces, 128": 592,
    "delta as scores of 3 pieces, 512, all": 656,
    "key and value, half, keeping scores, 32, all": 448,
    "problem gradient, half, all": 320,
    "wide problem gradient, half, 32": 136,
    "wide problem gradient, half, all": 896,
    "few queries, half, all": 256,
    "problem gradient, float32, 32": 1172,
    "short bias, half, all": 88,
    "short bias, float32, 32": 256,
    "whole problem, float32, 32": 1888,
    "whole problem, float32, all": 2048,
}


def _builds() -> dict[str, Build]:
    builds = {
        "delta": Build("recompute", "delta_kernel", True, 128, {"lse_strides": ("i32", "i32", 1)}),
        "dropout keys": Build("dropout", "dropout_keys_kernel", True, 1, {**DROPPED, "seed_ptr": "*i64"}),
        "merge parts": Build("few_queries", "merge_parts_kernel", True, 128, {"BLOCK_M": 8, "BLOCK_E": 128}),
        "split": Build("bf16_split", "split_kernel", False, 64, PIECES),
    }

    def add(
        name: str,
        label: str,
        half: bool,
        features: int,
        arguments: dict[str, Any],
        targets: tuple[int, ...],
        count: int = 1,
    ) -> None:
        module, kernel, absent = KERNELS[name]
        if count > 1:
            name, label = f"{name} of {count} pieces", label.removeprefix(f"{count} pieces, ")
        own = {**dict.fromkeys(absent), **arguments}
        label = f"{name}, {label}"
        builds[label] = Build(module, kernel, half, features, own, targets, SPILLS.get(label, 0))

    kept = {"grad_scores_ptr": "*bf16"}
    sums = {"grad_query_ptr": F32}
    for name, label, features, arguments, targets in (
        ("forward", "128", 128, {}, TARGETS),
        ("forward", "512", 512, {}, (90,)),
        ("forward", "all", 64, ALL, (90,)),
        ("forward", "128, float64 bias", 128, {**BIASED, "bias_ptr": "*fp64"}, TARGETS),
        ("query", "128", 128, {}, TARGETS),
        ("query", "128, float64 bias", 128, {**BIASED, "bias_ptr": "*fp64"}, (90,)),
        ("query", "256", 256, {}, (80,)),
        ("query", "all", 64, ALL, (90,)),
        *((name, "padded, 72", 72, PADDED, TARGETS) for name in ("forward", "query", "key and value")),
        ("query", "own bias, 64", 64, OWN_BIAS, TARGETS),
        ("query", "own bias, 80", 80, OWN_BIAS, TARGETS),
        ("query", "own bias, all", 64, {**ALL, "grad_bias_ptr": F32}, (90,)),
        ("key and value", "128", 128, {}, TARGETS),
        ("key and value", "all", 64, ALL, (90,)),
        ("key and value", TRANSPOSED_BIAS, 64, {**BIASED, "bias_ptr": "*bf16", **BIAS_TRANSPOSED}, (90,)),
        ("key and value", IN_PARTS, 64, {**BIASED, "bias_ptr": "*bf16", **PARTS}, (90,)),
        ("key and value", "keeping scores, 64", 64, {**kept, **BIASED}, (90,)),
        ("key and value", "keeping scores, 128", 128, {**kept, **BIASED}, (80,)),
        ("key and value", "keeping scores, all", 64, {**kept, "grad_z_ptr": "*bf16", **ALL}, (90,)),
        ("key", "256", 256, {}, (80,)),
        ("value", "256", 256, {}, (80,)),
        ("value", "keeping scores, 256", 256, {**kept, **BIASED}, TARGETS),
        ("scores", "512", 512, {**kept, "weight_ptr": "*bf16"}, (90,)),
        ("scores", "300, all", 300, {**kept, "grad_z_ptr": "*bf16", **ALL}, TARGETS),
        ("query of scores", "64", 64, {**kept, "ADD": False}, (90,)),
        ("query of scores", "512", 512, {**kept, "ADD": False}, (90,)),
        ("query of scores", "300, all", 300, {**kept, **sums, **MASKED}, (80,)),
        ("key and value of scores", "512", 512, {**kept, **VALUE, "weight_ptr": "*bf16"}, (90,)),
        (
            "key and value of scores",
            "300, all",
            300,
            {**kept, **VALUE, "weight_ptr": "*bf16", **MASKED},
            (80,),
        ),
        ("bias of scores", "64", 64, kept, TARGETS),
        ("few queries", "128", 128, {**MASKED, "part_ptr": None, "part_sums_ptr": None}, TARGETS),
        ("few queries", "256", 256, MASKED, (90,)),
        ("few queries", "all", 64, ALL, TARGETS),
        ("problem forward", "32", 32, {**BIASED, "bias_ptr": "*bf16"}, TARGETS),
        ("problem gradient", "32", 32, {**BIASED, "bias_ptr": "*bf16"}, (90,)),
        ("problem gradient", "all", 64, {**ALL, "SHARED": False}, TARGETS),
        ("wide problem gradient", "32", 32, {**OWN_BIAS, "SHARED": False}, TARGETS),
        ("wide problem gradient", "all", 64, {**ALL, "SHARED": False}, TARGETS),
        ("short bias", "64", 64, {**BIASED, "bias_ptr": "*bf16", "transposed_bias_ptr": "*bf16"}, (90,)),
        ("short bias", "all", 64, {**ALL, "transposed_bias_ptr": F32}, TARGETS),
        ("query", "32, all", 32, ALL, (90,)),
        ("key and value", "keeping scores, 32, all", 32, {**kept, "grad_z_ptr": "*bf16", **ALL}, (90,)),
    ):
        add(name, f"half, {label}", True, features, arguments, targets)
    add("query", "float32, 64", False, 64, {}, TARGETS)
    add("problem gradient", "float32, 32", False, 32, BIASED, TARGETS)
    add("short bias", "float32, 32", False, 32, BIASED, TARGETS)
    add("whole problem", "float32, 32", False, 32, BIASED, TARGETS)
    add("whole problem", "float32, all", False, 32, ALL, TARGETS)
    add("bias of scores", "float32, 64", False, 64, {"grad_scores_ptr": F32}, (90,))
    dlse = {"lse_strides": ("i32", "i32", 1)}
    add("delta as query", "float32, 64", False, 64, dlse, TARGETS)
    kept = {"grad_scores_ptr": F32}
    for count in (2, 3):
        pieces = {"PIECES": count, **{f"{name}_ptr": "*bf16" for name in OPERANDS}}
        pieces |= {f"{name}_strides": (*STRIDES, "i32") for name in OPERANDS}
        whole = {f"{name}_ptr": F32 for name in OPERANDS} | {f"{name}_strides": STRIDES for name in OPERANDS}
        for name, label, features, arguments, targets in (
            ("forward", "64", 64, {}, (90,)),
            ("forward", "128, all", 128, ALL, (90, 80) if count == 3 else (90,)),
            ("forward", "256, all", 256, ALL, (90,)),
            ("forward", "256, biased", 256, BIASED, (90,)),
            ("key and value", "keeping scores, 64", 64, kept, (90,)),
            ("key and value", "keeping scores, 64, all", 64, {**kept, "grad_z_ptr": F32, **ALL}, (80,)),
            ("value", "keeping scores, 128", 128, kept, TARGETS),
            ("scores", "256", 256, {**kept, "weight_ptr": F32}, (90,)),
            ("scores", "300, all", 300, {**kept, "weight_ptr": F32, "grad_z_ptr": F32, **ALL}, TARGETS),
            ("delta as key and value", "64", 64, dlse, (90,)),
            ("delta as value", "128", 128, dlse, TARGETS),
            ("delta as scores", "512, all", 512, {**dlse, **ALL}, TARGETS),
            ("query of scores", "128", 128, {**kept, "ADD": False}, (90,)),
            ("query of scores", "300, all", 300, {**kept, **MASKED}, (80,)),
            ("key and value of scores", "128", 128, kept, (90,)),
            ("key and value of scores", "300, all", 300, {**kept, **MASKED}, (80,)),
            *(
                [("key and value of scores", IN_PARTS, 160, {**kept, "weight_ptr": F32, **PARTS}, (90,))]
                * (count == 3)
            ),
        ):
            if count == 2 and name.startswith("delta"):
                continue  # three pieces alone are so exact
            if count == 2 and name == "value" and features == 128:
                name, arguments = "key and value", kept
                if targets == TARGETS:
                    targets = (90,)
            once = LOADED_ONCE.get(name, ()) if features <= 128 else ()
            split_here = {key: given for key, given in whole.items() if key.startswith(once)} if once else {}
            own = {**pieces, **split_here, **arguments}
            add(name, f"{count} pieces, {label}", False, features, own, targets, count)
    column = {"bias_ptr": "*bf16", "bias_strides": ("i32", "i32", "i32", 1), "COLUMN_BIAS": True}
    builds["forward, half, few features"] = Build("forward", "forward_kernel", True, 24, column, (90,))
    unknown = {"K": "i32?", "E": "i32?"}
    for name, strides in (
        ("forward", ("query", "key", "value", "out")),
        ("query", ("query", "key", "value", "grad_output", "grad_query")),
        ("key and value", ("query", "key", "value", "grad_output", "grad_key", "grad_value")),
    ):
        rows = {f"{each}_strides": ("i32?", "i32?", "i32?", 1) for each in strides}
        add(name, f"half, {IN_VECTORS}", True, 72, {**unknown, **rows}, (90,))
        if name != "key and value":  # it loads its bias into registers, which nothing here counts
            add(name, f"half, {BIAS_IN_VECTORS}", True, 80, BIAS_OF_196, (90,))
    return builds


TRANSPOSED_BIAS = "64, a transposed bias"
BIAS_TRANSPOSED = {"BIAS_TRANSPOSED": True, "BIAS_STEP": 8}
IN_PARTS = "in parts of the queries"
PARTS = {
    "IN_PARTS": True,
    **dict.fromkeys(("grad_key_ptr", "grad_value_ptr"), F32),
    **dict.fromkeys(("grad_key_strides", "grad_value_strides"), (*STRIDES, "i32")),
}
IN_VECTORS = "72, of which Triton knows no divisor"
BIAS_IN_VECTORS = "80, a bias of 196 keys"
BIAS_OF_196 = {
    "bias_ptr": "*bf16",
    "bias_strides": ("i32?", "i32?", "i32?", 1),
    "N": "i32?",
    "BIAS_STEP": 4,
}
BUILDS = _builds()
