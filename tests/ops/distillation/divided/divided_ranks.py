"""What test_divided.py runs as several processes: heads whose classes are divided over them."""

from typing import Any

from tests.ops.distillation.divided.errors import errors, fsdp
from tests.ops.distillation.divided.matrix import matrix
from tests.ops.distillation.divided.steps import compiled, moved, peak
from tests.ops.distillation.divided.values import excluded, near_teacher, triton

SCENARIOS = {
    each.__name__: each for each in (excluded, triton, near_teacher, errors, fsdp, peak, compiled, moved)
}


def run(kind: str, rank: int) -> dict[str, Any]:
    if kind.startswith("matrix"):
        return matrix(kind.split()[1])
    return SCENARIOS[kind]() or {}
