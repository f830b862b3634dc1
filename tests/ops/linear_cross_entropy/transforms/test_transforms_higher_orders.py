"""Derivatives of first and second order, against finite differences and the dense loss."""

import pytest
import torch

from lowtide.memory import peak_memory
from tests.ops.linear_cross_entropy.kinds import KINDS, REDUCTIONS, assert_close, loss_of_leaves, small
from tests.support.extended import all_extended_but
from tests.support.loss import (
    dense,
    differentiate,
    fused,
    fused_log_probs,
    make_inputs,
)

# torch.func.jvp imports torch.jit, which warns that it is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_first_and_second_order(device, reduction, kind, backend):
    """Against finite differences, and backward mode against forward mode."""
    inputs, options = small(device, kind)
    loss, values = loss_of_leaves(inputs, reduction=reduction, backend=backend, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_of_probabilities_and_class_weight(device, reduction):
    inputs, options = small(device, "all, probabilities")
    inputs.target.requires_grad_(), inputs.weight.requires_grad_()
    loss, values = loss_of_leaves(inputs, reduction=reduction, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert len(leaves) == 6
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("result", [0, 1, 2])
def test_derivatives_of_log_probs(device, result):
    inputs, _ = small(device, "plain", bias=True, logit_scale=True)

    def of_one(inputs):
        return fused_log_probs(inputs, softcap=1.5)[result]

    loss, values = loss_of_leaves(inputs, of_one)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("workspace", [None, "few"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradient_penalty(device, reduction, kind, workspace):
    """create_graph, and the ordinary backward of what comes out, whatever the chunks."""
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=torch.float64, **made)
    leaves = tuple(inputs.leaves().values())
    found = []
    for loss_of, own in ((fused, {"workspace": workspace and 100_000}), (dense, {})):
        loss = loss_of(inputs, reduction=reduction, **own, **options).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        total = loss + sum(gradient.square().sum() for gradient in gradients)
        found.append(torch.autograd.grad(total, leaves))
    assert_close(*found)


@pytest.mark.parametrize(
    ("order", "dtype"),
    all_extended_but([(2, torch.float32)], [(2, torch.float32), (2, torch.bfloat16), (3, torch.float32)]),
)
@pytest.mark.parametrize("kind", ["all, classes", "all, probabilities"])
def test_workspace_kept_by_higher_orders(device, kind, order, dtype):
    """Of a penalty on gradients, and of one on its gradients: beside the workspace there are
    gradients, and copies of the operands in float32."""
    made, options = KINDS[kind]
    N, V = 96, 1024
    inputs = make_inputs(N, 4, V, device=device, dtype=dtype, **made)
    leaves = tuple(inputs.leaves().values())
    workspace = N * V * 4 // 2

    def step():
        loss = fused(inputs, workspace=workspace, **options)
        for left in reversed(range(order)):
            found = torch.autograd.grad(loss, leaves, create_graph=left > 0)
            loss = sum(gradient.float().square().sum() for gradient in found)

    step()
    with peak_memory(device) as peak:
        step()
    assert peak.bytes <= workspace + 4 * order * sum(leaf.numel() * 4 for leaf in leaves)
    assert peak.largest <= workspace


def test_double_graph_backward_twice(device):
    """What create_graph gives may be differentiated again, and the first gradients stay."""
    inputs = make_inputs(device=device, dtype=torch.float64)
    plain = differentiate(fused, inputs)
    loss = fused(inputs)
    (first,) = torch.autograd.grad(loss, inputs.input, create_graph=True)
    before = first.detach().clone()
    seconds = [
        torch.autograd.grad(first.square().sum(), inputs.linear_weight, retain_graph=True)[0]
        for _ in range(2)
    ]
    assert torch.equal(*seconds)
    assert torch.equal(first.detach(), before)
    (again,) = torch.autograd.grad(loss, inputs.input)
    assert_close((before, again), (plain["input"],) * 2)
