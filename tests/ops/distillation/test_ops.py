"""The operators by themselves: FLOPs, the order of class blocks, what is known of outputs."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.distillation.planner import make_plan
from tests.ops.distillation.helpers import (
    DIVERGENCES,
    HALVES,
    REDUCTIONS,
    check,
    differentiate,
    fused,
    make_inputs,
)
from tests.support.loss import rows_for, smallest_workspace


def products(step):
    """FLOPs in products of 37 rows, 19 features, 63 classes; the teacher has half the features."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / (2 * 37 * 20 * 63)


def test_flops(device):
    """Both heads' logits, and one product for each gradient."""
    inputs = make_inputs(37, 20, 63, 10, device=device)
    frozen = replace(inputs, student_weight=inputs.student_weight.detach())
    assert products(lambda: fused(inputs, "forward").backward()) == 1.5 + 2
    assert products(lambda: fused(frozen, "js 0.5").backward()) == 1.5 + 1
    assert products(lambda: fused(inputs, "reverse", reduction="none").sum().backward()) == 1.5 + 1.5 + 2
    with torch.no_grad():
        assert products(lambda: fused(inputs, "forward")) == 1.5


def plan(inputs, workspace):
    heads = Heads(**dict(inputs.items()))
    return make_plan(heads, DistillationOptions(0.0, workspace=workspace).of(heads, None), [True] * 3)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("room", [1, 4])
def test_class_blocks(device, dtype, divergence, reduction, room):
    """Where the float32 sum of dW does not fit the workspace."""
    N = rows_for(device, dtype, 11)
    inputs = make_inputs(N, 150, 37, 9, device=device, dtype=dtype, bias=True)
    least = smallest_workspace(lambda workspace: fused(inputs, divergence, workspace=workspace))
    options = {"workspace": room * least, "reduction": reduction, "temperature": 1.3, "student_softcap": 4.0}
    assert plan(inputs, room * least).weight_gradient == "class_blocks"
    assert plan(inputs, room * least).block_classes < 37 or room > 1
    upstream = torch.randn(N, device=device) if reduction == "none" else 0.3
    result = differentiate(fused, inputs, divergence, upstream, **options)
    check(result, inputs, divergence, upstream, **options)


def test_sum_kept_where_it_fits(device):
    inputs = make_inputs(300, 8, 37, 4, device=device, dtype=torch.bfloat16, bias=True)
    assert plan(inputs, 1 << 24).weight_gradient == "accumulate"
    assert plan(inputs, None).weight_gradient == "accumulate"
    assert (
        plan(make_inputs(300, 8, 37, 4, device=device, bias=True), 1 << 17).weight_gradient == "accumulate"
    )  # there is none


@pytest.mark.parametrize("dtype", HALVES)
def test_input_is_weight(device, dtype):
    """What a compiler is told of each gradient does not depend on which tensor it belongs to."""
    student = torch.randn(5, 5, device=device).to(dtype)
    heads = Heads(student, student, None, student, student, None, None)
    options = DistillationOptions(0.0).of(heads, None)
    torch.library.opcheck(
        torch.ops.lowtide.distillation.default,
        (*heads, [True, True, False], *options),
        test_utils="test_faketensor",
    )
