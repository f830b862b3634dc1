"""A half-precision weight's gradient, rounded block by block from one chunk of all tokens."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.core.bfloat16_units import gemm
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_torch import RoundedBlocks
from lowtide.ops.linear_cross_entropy.operator import planner
from lowtide.ops.linear_cross_entropy.planning import memory_model, requirements
from lowtide.ops.linear_cross_entropy.planning.division import sizes
from tests.support.loss import (
    HALVES,
    call_of_sizes,
    check,
    differentiate,
    fused,
    make_inputs,
    planned,
    workspace_for,
)

BF16 = torch.bfloat16


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("block", [1, 3, 64, 101, 200])
def test_rounded_blocks_equal_whole_sum(block, dtype):
    V, D = 101, 16
    g_CV, x_CD, factor = torch.randn(40, V), torch.randn(40, D), torch.tensor(1 / 7)
    class_N, coef_N = torch.randint(V, (40,)), torch.randn(40)
    gradient_VD = torch.empty(V, D, dtype=dtype)
    rounded = RoundedBlocks(gradient_VD, factor, block)
    rounded.add_product(g_CV, x_CD, first=True, last=True)
    rounded.add_target_rows(x_CD, coef_N, class_N, slice(None))
    rounded.finish()
    wide = g_CV.double().t() @ x_CD.double()
    wide.index_add_(0, class_N, x_CD.double() * coef_N.double()[:, None])
    tolerance = torch.finfo(dtype).eps
    assert torch.allclose(gradient_VD.double(), wide / 7, rtol=tolerance, atol=1e-6)


def takes_one(plan):
    return plan.cpu_exponentials and plan.weight_gradient == "single_product"


@pytest.fixture
def _units(monkeypatch):
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)


@pytest.mark.usefixtures("_units")
@pytest.mark.parametrize(
    "options",
    [{}, {"z_loss": 0.01, "logit_scale": 0.7, "label_smoothing": 0.1}],
    ids=["plain", "options"],
)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("V", [502, 503])
def test_single_product_gradients_and_workspace(monkeypatch, V, reduction, options):
    monkeypatch.setattr(memory_model, "ROUNDED_CLASSES", 64)
    monkeypatch.setattr(sizes, "ROUNDED_NUMBERS", 64 * 160)
    inputs = make_inputs(120, 160, V, dtype=BF16, bias=bool(options), class_weight=bool(options))
    facts = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = workspace_for(inputs, takes_one, **facts)
    plan = planned(inputs, workspace, **facts)
    assert plan.rows == 120
    assert plan.block_classes == 64
    upstream = torch.randn(inputs.target.shape) if reduction == "none" else -0.5
    given = {"workspace": workspace, "reduction": reduction, **options}
    actual = differentiate(fused, inputs, upstream, **given)
    check(actual, inputs, upstream=upstream, reduction=reduction, **options)
    gradients = sum(leaf.nbytes for leaf in inputs.leaves().values())
    for leaf in inputs.leaves().values():
        leaf.grad = None
    with peak_memory("cpu") as peak:
        fused(inputs, **given).backward(torch.as_tensor(upstream))
    assert peak.bytes <= workspace + gradients + 4 * inputs.target.numel()


@pytest.mark.parametrize("room", [0, 1 << 20, 1 << 24, None])
def test_blocks_are_large_and_fit(monkeypatch, room):
    """Whatever the sizes, a block has 512 classes or more, and the plan fits in the workspace."""
    monkeypatch.setattr(gemm, "against", lambda: None)
    taken = 0
    for N, D, V in itertools.product((16, 64, 100, 300), (8, 64, 300, 2048), (8192, 30790, 50257)):
        with FakeTensorMode():
            call = call_of_sizes(N, D, V, device="cpu")
            if room is not None:
                _, _, counts = planner._memory(call)
                given = call.options._replace(workspace=counts.one_chunk + room)
                call = call._replace(options=given)
            _, workspace, counts = planner._memory(call)
            plan = planner.make_plan(call)
        if takes_one(plan):
            taken += 1
            assert plan.block_classes >= 512
            assert sizes.tiling_bytes(counts, plan) <= workspace
    assert taken >= 30


@pytest.mark.usefixtures("_units")
def test_single_product_takes_no_fourth_product(monkeypatch):
    """The head of GPT-2 in bfloat16, in the default workspace: no exponential is computed twice."""
    calls, exponentials = [], gemm.exponentials
    monkeypatch.setattr(gemm, "exponentials", lambda *a, **k: calls.append(1) or exponentials(*a, **k))
    for tokens in (16, 100, 500):
        inputs = make_inputs(tokens, 64, 50257, dtype=BF16, ignored=0.0)
        assert takes_one(planned(inputs, None))
        calls.clear()
        differentiate(fused, inputs)
        assert len(calls) == 1
