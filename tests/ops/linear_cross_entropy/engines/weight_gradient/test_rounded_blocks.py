"""A half-precision weight's gradient, rounded block by block from one chunk of all tokens."""

import pytest
import torch

from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials import spec as cpu_spec
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.gemm import gemm
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_torch import RoundedBlocks
from lowtide.ops.linear_cross_entropy.planning import memory_model
from lowtide.ops.linear_cross_entropy.planning.division import sizes
from tests.support.loss import HALVES, check, differentiate, fused, make_inputs, planned, workspace_for

ENGINES = ["logits_torch", "cpu_exponentials"]


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


def takes_one(engine):
    return lambda plan: plan.engine == engine and plan.weight_gradient == "single_product"


@pytest.fixture(params=ENGINES)
def engine(request, monkeypatch):
    """One of the engines of a CPU, with blocks of few classes."""
    if request.param == "cpu_exponentials":
        if not gemm.available():
            pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
        monkeypatch.setattr(cpu_spec, "FEWEST_WEIGHTS", 0)
    else:
        monkeypatch.setattr(gemm, "against", lambda: "of a test")
    monkeypatch.setattr(memory_model, "ROUNDED_CLASSES", 64)
    monkeypatch.setattr(sizes, "ROUNDED_NUMBERS", 64 * 160)
    return request.param


OPTIONS = {
    "plain": {},
    "z-loss, scale": {"z_loss": 0.01, "logit_scale": 0.7},
    "smoothing, soft cap": {"label_smoothing": 0.1, "softcap": 3.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("V", [502, 503])
def test_single_product_gradients_and_workspace(engine, V, dtype, reduction, options):
    if engine == "cpu_exponentials" and (dtype != torch.bfloat16 or "softcap" in options):
        pytest.skip("the engine does not run this call")
    inputs = make_inputs(120, 160, V, dtype=dtype, bias=bool(options), class_weight=bool(options))
    facts = {name: value for name, value in options.items() if name != "logit_scale"}
    workspace = workspace_for(inputs, takes_one(engine), **facts)
    plan = planned(inputs, workspace, **facts)
    assert plan.rows == 120
    assert plan.block_classes < V / 4
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


def test_single_product_takes_no_fourth_product(monkeypatch):
    """The head of GPT-2 in bfloat16, in the default workspace: no exponential is computed twice."""
    if not gemm.available():
        pytest.skip("this CPU has no units for bfloat16, or there is no compiler")
    calls, exponentials = [], gemm.exponentials
    monkeypatch.setattr(gemm, "exponentials", lambda *a, **k: calls.append(1) or exponentials(*a, **k))
    for tokens in (16, 100, 500):
        inputs = make_inputs(tokens, 64, 50257, dtype=torch.bfloat16, ignored=0.0)
        assert takes_one("cpu_exponentials")(planned(inputs, None))
        calls.clear()
        differentiate(fused, inputs)
        assert len(calls) == 1
