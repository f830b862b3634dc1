"""Compiles every Triton kernel of the op ahead of time, without a GPU; prints what ptxas says:

    python -m tests.ops.linear_cross_entropy.engines.compile_kernels

one JSON object a line. TRITON_INTERPRET must not be set: it would turn the kernels into Python
functions.
"""

import importlib

from tests.ops.linear_cross_entropy.engines.builds import (
    exponentials,
    gluon,
    logits,
    rows,
    soft_targets,
    weight_gradient,
)
from tests.ops.linear_cross_entropy.engines.builds.build import TARGETS, Build
from tests.support.ahead_of_time import compiled, print_all

PARTS = (logits, exponentials, soft_targets, rows, weight_gradient, gluon)
BUILDS = {name: build for part in PARTS for name, build in part.BUILDS.items()}
# Kernels whose builds take more than a second each.
SLOW = (
    *("exponentials_kernel", "_distances_kernel", "_distance_pipeline_kernel", "_add_product_kernel"),
    *("_add_product_pipelined_kernel", "_input_gradient_product_kernel", "_parts_kernel"),
)
# Builds that another build covers (tests/support/ahead_of_time.py).
LEFT_OUT = {
    capability: [name for part in PARTS for name in part.LEFT_OUT.get(capability, ())]
    for capability in TARGETS
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
