"""Distillation of bfloat16 heads by the bfloat16 units of a CPU."""

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.memory import peak_memory
from lowtide.ops.distillation import ops, planner
from lowtide.ops.linear_cross_entropy.planning import requirements
from tests.ops.distillation.helpers import (
    DIVERGENCES,
    check,
    differentiate,
    fused,
    make_inputs,
)

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not gemm.available(), reason="this CPU has no units for bfloat16, or there is no compiler"
)
# Rows, and a workspace in which dW is formed so.
WAYS = {"single_product": (90, 1 << 22), "accumulate": (300, 1 << 22), "class_blocks": (300, 150_000)}


STUDENT = ("student_input", "student_weight")


@pytest.fixture
def plans(monkeypatch):
    """The plans that are made."""
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)
    monkeypatch.setattr(planner, "FEWEST_ROWS", 4)
    made, make = [], planner.make_plan

    def kept(*arguments):
        made.append(make(*arguments))
        return made[-1]

    monkeypatch.setattr(ops, "make_plan", kept)
    return made


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_and_workspace(plans, divergence, way, reduction):
    N, workspace = WAYS[way]
    inputs = make_inputs(N, 48, 203, 33, dtype=BF16, bias=True, ignored=0.2)
    options = {"temperature": 1.3, "student_softcap": 9.0, "workspace": workspace, "reduction": reduction}
    upstream = torch.rand(N) + 0.5 if reduction == "none" else 0.3
    fused(inputs, divergence, **options).sum().backward()  # the library is loaded
    gradients = sum(leaf.nbytes for leaf in inputs.leaves().values())
    with peak_memory("cpu") as peak:
        found = differentiate(fused, inputs, divergence, upstream, **options)
    assert plans[-1].weight_gradient == way  # that of the call with gradients
    assert all(each.options.student_dtype == each.options.teacher_dtype == BF16 for each in plans)
    assert peak.bytes <= workspace + 2 * gradients + 4 * N
    check(found, inputs, divergence, upstream, **options)


def test_heads_choose_apart(plans):
    """A float32 student beside a bfloat16 teacher."""
    inputs = make_inputs(300, 48, 203, 33, dtype=BF16)
    student = {name: getattr(inputs, name).detach().float().requires_grad_() for name in STUDENT}
    inputs = inputs.__class__(**{**dict(inputs.items()), **student})
    found = differentiate(fused, inputs, "forward")
    assert plans[0].options.student_dtype == torch.float32
    assert plans[0].options.teacher_dtype == BF16
    check(found, inputs, "forward")
