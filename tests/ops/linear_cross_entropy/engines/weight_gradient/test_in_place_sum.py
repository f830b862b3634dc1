"""A half-precision weight's gradient whose float32 sum lies half in the gradient's own memory."""

from dataclasses import replace

import pytest
import torch

from lowtide.core import pending_gradient
from lowtide.memory import peak_memory
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_torch import InPlaceSum
from lowtide.tools.bench.cases import CASES
from tests.support.loss import HALVES, check, differentiate, fused, make_inputs, planned, workspace_for


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("V", [1, 2, 3, 4, 7, 64, 101])
@pytest.mark.parametrize("D", [1, 5, 32])
def test_in_place_sum_rounded_once(D, V, dtype):
    gradient_VD = torch.empty(V, D, dtype=dtype)
    chunks = [(torch.randn(6, V), torch.randn(6, D)) for _ in range(3)]
    factor = torch.tensor(1 / 7)
    shared = InPlaceSum(gradient_VD, factor)
    apart = [torch.zeros(V // 2, D), torch.zeros(V - V // 2, D)]
    for i, (g_CV, x_CD) in enumerate(chunks):
        shared.add_product(g_CV, x_CD, first=i == 0, last=False)
        for sum_BD, g_CB in zip(apart, (g_CV[:, : V // 2], g_CV[:, V // 2 :])):
            sum_BD.addmm_(g_CB.t(), x_CD, beta=int(i > 0))
    shared.finish()
    assert torch.equal(gradient_VD, (torch.cat(apart) * factor).to(dtype))


def test_in_place_sum_memory():
    V, D = 1001, 512
    gradient_VD = torch.empty(V, D, dtype=torch.bfloat16)
    g_CV, x_CD, factor = torch.randn(64, V), torch.randn(64, D), torch.tensor(0.5)
    with peak_memory("cpu") as peak:
        shared = InPlaceSum(gradient_VD, factor)
        shared.add_product(g_CV, x_CD, first=True, last=False)
        shared.finish()
    assert peak.bytes == 501 * D * 4 + D * 4  # the sum, and one row


def is_split(plan):
    return plan.weight_gradient == "packed"


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("V", [502, 503])
def test_gradients_and_workspace(V, dtype, reduction):
    """Everything the loss has, in little enough memory for this sum, and a gradient to show it."""
    D = 160
    inputs = make_inputs(370, D, V, dtype=dtype, bias=True, class_weight=True, logit_scale=True)
    options = {"reduction": reduction, "label_smoothing": 0.1, "z_loss": 0.01}
    workspace = workspace_for(inputs, is_split, label_smoothing=0.1, z_loss=0.01)
    upstream = torch.randn(inputs.target.shape) if reduction == "none" else -0.5
    actual = differentiate(fused, inputs, upstream, workspace=workspace, **options)
    check(actual, inputs, upstream=upstream, **options)
    gradients = sum(leaf.nbytes for leaf in inputs.leaves().values())
    for leaf in inputs.leaves().values():
        leaf.grad = None
    upstream = torch.as_tensor(upstream)
    with peak_memory("cpu") as peak:
        fused(inputs, workspace=workspace, **options).backward(upstream)
    assert peak.bytes <= workspace + gradients + 4 * inputs.target.numel()
    assert peak.largest < V * D * 4


def test_in_place_sum_no_valid_rows():
    inputs = make_inputs(200, 24, 101, dtype=torch.bfloat16)
    inputs = replace(inputs, target=torch.full_like(inputs.target, -100))
    workspace = workspace_for(inputs, is_split)
    actual = differentiate(fused, inputs, workspace=workspace, reduction="sum")
    assert not actual["linear_weight"].any()


def test_benchmark_shape_three_products():
    """Its float32 sum is all of the default workspace."""
    (case,) = (case for case in CASES if case.name == "cpu-bf16")
    x, w = (
        torch.zeros(1, dtype=case.dtype).expand(size, case.features) for size in (case.tokens, case.classes)
    )
    inputs = replace(make_inputs(), input=x.requires_grad_(), linear_weight=w.requires_grad_())
    plan = planned(inputs, None)
    assert is_split(plan)
    assert plan.rows >= 128


@pytest.mark.parametrize("dtype", HALVES)
def test_cpu_product_with_factor_rounded_once(dtype):
    """Of one half-precision tensor and a float32 factor, without a copy of the tensor."""
    tensor, factor = torch.randn(300, 40).to(dtype), torch.tensor(1 / 1843)
    want = (tensor.float() * factor).to(dtype)
    out = torch.empty_like(tensor)
    with peak_memory("cpu") as peak:
        pending_gradient.scale_into(out, tensor, factor, "torch")
    assert torch.equal(out, want)
    assert peak.bytes < 64
    pending_gradient.scale_into(tensor, tensor, factor, "torch")
    assert torch.equal(tensor, want)


@pytest.mark.parametrize("spent", [False, True])
def test_float32_sum_rounded_once_and_kept(spent):
    tensor, factor = torch.randn(300, 40), torch.tensor(1 / 1843)
    before, out = tensor.clone(), torch.empty(300, 40, dtype=torch.bfloat16)
    pending_gradient.scale_into(out, tensor, factor, "torch", spent=spent)
    assert torch.equal(out, (before * factor).bfloat16())
    assert spent or torch.equal(tensor, before)
