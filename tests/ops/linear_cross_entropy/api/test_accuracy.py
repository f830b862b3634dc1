"""The promise in half precision: errors no larger than those of eager torch with float32 logits,
however many chunks, and for tokens that the model is sure of."""

from dataclasses import replace

import pytest
import torch

from tests.support.extended import all_extended_but
from tests.support.loss import dense, differentiate, fused, make_inputs, norm, planned, workspace_for

N, D, V = 512, 64, 1000


def errors(actual, exact):
    return {name: norm(actual[name].double() - exact[name]) / norm(exact[name]) for name in exact}


def check_promise(inputs, *, factor=1.1, **options):
    plain = {name: value for name, value in options.items() if name == "reduction"}
    exact = differentiate(dense, inputs.to(torch.float64), **plain)
    eager = errors(differentiate(dense, inputs, **plain), exact)
    ours = errors(differentiate(fused, inputs, **options), exact)
    assert ours["loss"] <= max(1e-5, 2 * eager["loss"])
    for name in ("input", "linear_weight"):
        assert ours[name] <= factor * eager[name], f"{name}: {ours[name]:.3e}, eager {eager[name]:.3e}"


def workspace_of_chunks(chunks, inputs, **options):
    if chunks == 1:
        return None
    workspace = workspace_for(inputs, lambda plan: plan.rows >= N // chunks, **options)
    made = planned(inputs, workspace, **options)
    # With class blocks a chunk has as many rows as the weight gradient's memory holds.
    assert -(-N // made.rows) == chunks or made.weight_gradient == "class_blocks"
    return workspace


def confident_inputs(probability, device, dtype):
    """Rows whose targets have about this probability: each input is moved along its weight."""
    inputs = make_inputs(N, D, V, device=device, dtype=torch.float64, ignored=0.0, scale=1.0)
    with torch.no_grad():
        weight_ND = inputs.linear_weight[inputs.target]
        along_N = weight_ND / weight_ND.square().sum(1, keepdim=True)
        low_N, high_N = torch.full_like(along_N[:, :1], -50), torch.full_like(along_N[:, :1], 50)
        for _ in range(40):
            middle_N = (low_N + high_N) / 2
            logits_NV = (inputs.input + middle_N * along_N) @ inputs.linear_weight.t()
            above = logits_NV.softmax(1).gather(1, inputs.target[:, None]) > probability
            low_N, high_N = torch.where(above, low_N, middle_N), torch.where(above, middle_N, high_N)
        x_ND = inputs.input + high_N * along_N
    inputs = replace(inputs, input=x_ND.requires_grad_()).to(dtype)
    reached = dense(inputs.to(torch.float64), reduction="none").neg().exp().median().item()
    assert abs((1 - reached) / (1 - probability) - 1) < 0.1
    return inputs


@pytest.mark.parametrize("chunks", all_extended_but([1, 8, 64], [1, 8, 64, 256]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_errors_independent_of_chunks(device, reduction, dtype, chunks):
    inputs = make_inputs(N, D, V, device=device, dtype=dtype, ignored=0.1)
    workspace = workspace_of_chunks(chunks, inputs, reduction=reduction)
    check_promise(inputs, reduction=reduction, workspace=workspace)


@pytest.mark.parametrize("chunks", [1, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("probability", [0.9, 0.99, 0.999, 0.9999])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_confident_tokens(device, reduction, probability, dtype, chunks):
    inputs = confident_inputs(probability, device, dtype)
    workspace = workspace_of_chunks(chunks, inputs, reduction=reduction)
    check_promise(inputs, reduction=reduction, workspace=workspace)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_loss_independent_of_chunks(device, dtype):
    """Each row's loss is computed from the same sums, so chunks of any size agree to rounding."""
    inputs = make_inputs(N, D, V, device=device, dtype=dtype)
    whole = fused(inputs, reduction="none").detach()
    for chunks in (8, 64, 256):
        workspace = workspace_of_chunks(chunks, inputs, reduction="none")
        parts = fused(inputs, reduction="none", workspace=workspace).detach()
        assert norm(parts - whole) <= 4 * torch.finfo(torch.float32).eps * norm(whole)


@pytest.mark.parametrize("chunks", [1, 64])
def test_weight_gradient_long_sums(device, chunks):
    """Rows that all push a class the same way: a half-precision sum of them would stop growing."""
    inputs = make_inputs(N, D, V, device=device, dtype=torch.bfloat16, ignored=0.0)
    x = inputs.input.detach().abs().requires_grad_()
    inputs = replace(inputs, input=x, target=torch.full_like(inputs.target, 5))
    workspace = workspace_of_chunks(chunks, inputs, reduction="sum")
    check_promise(inputs, reduction="sum", workspace=workspace)
