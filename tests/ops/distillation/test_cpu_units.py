"""Distillation of bfloat16 heads by the bfloat16 units of a CPU."""

from dataclasses import replace

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.core.errors import ArgumentError
from lowtide.memory import peak_memory
from lowtide.ops.distillation import ops, planner
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from lowtide.ops.linear_cross_entropy.planning import requirements
from tests.ops.distillation.helpers import (
    DIVERGENCES,
    check,
    differentiate,
    fused,
    make_inputs,
)
from tests.support.graphs import needs_tracing

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
    assert peak.bytes <= workspace + gradients + 8 * N + 16
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


@pytest.mark.parametrize("side", ["student", "teacher"])
def test_features_apart(plans, side):
    """Inputs and weights by columns: the units read such a weight, and a copy of such an input."""
    inputs = make_inputs(90, 48, 203, 33, dtype=BF16)
    by_columns = {
        name: tensor.detach().t().contiguous().t().requires_grad_(tensor.requires_grad)
        for name, tensor in inputs.items()
        if name.startswith(side)
    }
    inputs = replace(inputs, **by_columns)
    check(differentiate(fused, inputs, "reverse"), inputs, "reverse")
    assert plans[0].options.student_dtype == plans[0].options.teacher_dtype == BF16


@needs_tracing
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_call_equals_eager(backend):
    """A graph takes no single product, because it is made for any number of rows."""
    torch.compiler.reset()
    inputs = make_inputs(40, 512, 2048, 33, dtype=BF16)
    eager = differentiate(fused, inputs, "forward")
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    found = differentiate(compiled, inputs, "forward")
    check(eager, inputs, "forward")
    check(found, inputs, "forward")
    torch.compiler.reset()


@pytest.mark.parametrize(("N", "D", "V"), [(64, 256, 256), (64, 256, 1024), (16, 128, 512), (256, 512, 8192)])
def test_small_calls_have_whole_tiles(N, D, V):
    """The default workspace holds a chunk of all rows, and a tile of the pass beside it."""
    inputs = make_inputs(N, D, V, D, dtype=BF16, ignored=0)
    heads = Heads(*(getattr(inputs, name) for name in Heads._fields))
    options = DistillationOptions(0.0).of(heads, None).with_graph_facts(heads, [True, True, False])
    plan = planner.make_plan(heads, options, [True, True, False])
    assert plan.pass_logits >= min(N * V, planner.TILE_BYTES["cpu"] // 4 - V)
    if V > 2 * N:
        assert (plan.weight_gradient, plan.rows) == ("single_product", min(N, D // 4))


def test_float16_graph_of_a_card_is_refused():
    inputs = make_inputs(8, 16, 23, 9, dtype=torch.float16)
    heads = Heads(*(getattr(inputs, name) for name in Heads._fields))
    options = DistillationOptions(0.0, student_dtype=torch.float16, teacher_dtype=torch.float16)
    with torch.no_grad(), pytest.raises(ArgumentError, match="compiled or exported for float16"):
        torch.ops.lowtide.distillation(*heads, [True, True, False], *options)
