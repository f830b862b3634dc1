"""The engine of logits by the bfloat16 units of a CPU: what cpu_exponentials does not run."""

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    LogitTransform,
    RowCoefs,
    SoftmaxStats,
    TileColumns,
)
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import softmax_gradient_
from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.remembered import forget
from tests.support.half_products import half_products
from tests.support.loss import (
    check,
    check_log_probs,
    differentiate,
    differentiate_log_probs,
    fused,
    fused_log_probs,
    make_inputs,
    planned,
    workspace_for,
)

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not gemm.available(), reason="this CPU has no units for bfloat16, or there is no compiler"
)
WAYS = ["class_blocks", "packed", "single_product"]
# Arguments of make_inputs, and options of the call.
CALLS = {
    "smoothing and cap": ({}, {"label_smoothing": 0.1, "softcap": 5.0}),
    "learned scale": ({"logit_scale": True}, {}),
    "probabilities": ({"probabilities": True}, {}),
    "everything": (
        {"probabilities": True, "bias": True, "class_weight": True, "logit_scale": True},
        {"label_smoothing": 0.1, "softcap": 5.0, "z_loss": 0.01},
    ),
}


@pytest.fixture(autouse=True)
def _small_heads(monkeypatch):
    monkeypatch.setattr(requirements, "FEWEST_WEIGHTS", 0)
    forget()
    yield
    forget()


def formed(way):
    return lambda plan: plan.engine == "cpu_logits" and plan.weight_gradient == way


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_loss(name, way, reduction):
    made, options = CALLS[name]
    options = options | {"reduction": reduction}
    N, D = (70, 96) if way == "single_product" else (90, 300)
    inputs = make_inputs(N, D, 601, dtype=BF16, **made)
    workspace = workspace_for(inputs, formed(way), **options)
    upstream = torch.randn(N) if reduction == "none" else 0.5
    with half_products():
        check(
            differentiate(fused, inputs, upstream, workspace=workspace, **options),
            inputs,
            upstream=upstream,
            **options,
        )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bias", [False, True])
def test_log_probs(way, bias):
    N, D = (70, 96) if way == "single_product" else (90, 300)
    inputs = make_inputs(N, D, 601, dtype=BF16, bias=bias)
    workspace = workspace_for(inputs, formed(way), log_probs=True)
    upstream = [torch.randn(N) for _ in range(3)]
    with half_products():
        found = differentiate_log_probs(fused_log_probs, inputs, upstream, workspace=workspace)
        check_log_probs(found, inputs, upstream)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CALLS)
def test_workspace(name, way):
    made, options = CALLS[name]
    N = 70 if way == "single_product" else 600
    inputs = make_inputs(N, 96, 4001, dtype=BF16, **made)
    workspace = workspace_for(inputs, formed(way), **options)

    def step():
        for leaf in inputs.leaves().values():
            leaf.grad = None
        fused(inputs, workspace=workspace, **options).backward()

    step()
    with peak_memory("cpu") as peak:
        step()
    gradients = sum(leaf.nbytes for leaf in inputs.leaves().values())
    assert peak.bytes <= workspace + gradients + 4


@pytest.fixture
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_products_same_bits_any_threads():
    """The sums of dX and dW do not depend on how many rows a pass takes at a time."""
    made, options = CALLS["everything"]
    inputs = make_inputs(70, 96, 4001, dtype=BF16, **made)
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(differentiate(fused, inputs, **options))
    for other in found[1:]:
        for name in ("input", "linear_weight"):
            assert torch.equal(found[0][name], other[name])


def test_gradient_of_bias_is_summed_before_it_is_rounded():
    """A sum of rounded rows would err by some 2^-9."""
    N, V = 3000, 200
    z_NV, target_N = torch.randn(N, V), torch.randint(V, (N,))
    ones_N, stats = torch.ones(N), SoftmaxStats(*(torch.empty(N) for _ in range(3)))
    coefs = RowCoefs(target_N, torch.zeros(N, dtype=torch.bool), ones_N, ones_N)
    sum_V = torch.zeros(V)
    grad_NV = softmax_gradient_(
        z_NV.clone(),
        coefs,
        stats,
        TileColumns(0, LogitTransform(None, None, 0.0)),
        take_stats=True,
        gradient_dtype=BF16,
        bias_sum_B=sum_V,
    )
    exact_NV = z_NV.double().softmax(1)
    exact_NV[torch.arange(N), target_N] -= 1
    exact_V = exact_NV.sum(0)
    assert (sum_V.double() - exact_V).norm() < 1e-6 * exact_NV.abs().sum(0).norm()
    assert grad_NV.dtype == BF16
    assert (grad_NV.double() - exact_NV).norm() < 2**-8 * exact_NV.norm()


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 33, 1025), (64, 700, 130), (3, 2, 5)])
@pytest.mark.parametrize("name", CALLS)
def test_odd_shapes(name, shape):
    made, options = CALLS[name]
    inputs = make_inputs(*shape, dtype=BF16, ignored=0.0, **made)
    assert planned(inputs, None, **options).engine == "cpu_logits"
    with half_products():
        few = shape[0] * shape[1] < 100  # whose rounding may be luck
        check(differentiate(fused, inputs, **options), inputs, factor=4.0 if few else 2.0, **options)
