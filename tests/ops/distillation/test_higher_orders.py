"""Derivatives of higher order, transforms of torch.func, batched gradients."""

import pytest
import torch

from lowtide.ops.distillation import autograd, higher_order
from lowtide.ops.distillation.heads import DistillationOptions, Heads
from tests.ops.distillation.helpers import (
    DIVERGENCES,
    as_function,
    dense,
    differentiate,
    fused,
    gradients,
    make_inputs,
    small,
)
from tests.support.loss import norm


@pytest.mark.parametrize("caps", [{}, {"student_softcap": 2.0, "teacher_softcap": 3.0}], ids=["", "capped"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_derivatives_of_any_order(device, divergence, reduction, caps):
    loss, leaves = as_function(
        small(device), divergence, reduction=reduction, temperature=1.3, workspace=40_000, **caps
    )
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_higher_orders_finite_at_zero_probability(device, divergence):
    """Classes excluded by both, and confident rows."""
    inputs = make_inputs(device=device, bias=True, scale=100)
    with torch.no_grad():
        inputs.student_bias[3] = inputs.teacher_bias[3] = -torch.inf
    loss = fused(inputs, divergence)
    first = torch.autograd.grad(loss, tuple(inputs.leaves().values()), create_graph=True)
    second = torch.autograd.grad(sum(each.sum() for each in first), inputs.student_input)
    plain = differentiate(fused, inputs, divergence)
    for gradient, name in zip(first, inputs.leaves()):
        assert norm(gradient - plain[name]) <= 1e-4 * norm(plain[name]) + 1e-6
    assert second[0].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_transforms(device, divergence, reduction):
    inputs = small(device)
    loss, leaves = as_function(inputs, divergence, reduction=reduction)
    x, w, b = (leaf.detach() for leaf in leaves)

    def total(x, w, b):
        return loss(x, w, b).sum()

    expected = torch.autograd.grad(total(*leaves), leaves)
    for found, gradient in zip(torch.func.grad(total, (0, 1, 2))(x, w, b), expected):
        torch.testing.assert_close(found, gradient)
    moved = torch.randn_like(x)
    value, tangent = torch.func.jvp(lambda x: total(x, w, b), (x,), (moved,))
    torch.testing.assert_close((value, tangent), (total(x, w, b), (moved * expected[0]).sum()))
    batch = torch.stack((x, 2 * x))
    for element, found in enumerate(torch.func.vmap(torch.func.grad(lambda x: total(x, w, b)))(batch)):
        torch.testing.assert_close(found, torch.func.grad(lambda x: total(x, w, b))(batch[element]))
    torch.testing.assert_close(torch.func.vmap(lambda x: loss(x, w, b))(batch)[0], loss(x, w, b))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_batched_upstream_gradients(device, reduction):
    inputs = small(device)
    loss = fused(inputs, "forward", reduction=reduction)
    upstream = torch.randn(3, *loss.shape, dtype=loss.dtype, device=device)
    batched = gradients(loss, inputs, grad_outputs=upstream, is_grads_batched=True, retain_graph=True)
    for element, seed in enumerate(upstream):
        for name, gradient in gradients(loss, inputs, grad_outputs=seed, retain_graph=True).items():
            torch.testing.assert_close(batched[name][element], gradient)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_definition(device, divergence):
    """The definition, a chunk of rows at a time, is what the dense computation gives."""
    inputs = make_inputs(device=device, dtype=torch.float64, bias=True)
    tensors = dict(inputs.items())
    beta = float(divergence[3:]) if divergence.startswith("js") else float(divergence == "reverse")
    options = DistillationOptions(beta, 1.3, "mean", None, 2.0, 3.0, torch.float64, torch.float64)
    loss = higher_order.distillation(Heads(**tensors), options)
    caps = {"student_softcap": 2.0, "teacher_softcap": 3.0}
    torch.testing.assert_close(loss, dense(inputs, divergence, temperature=1.3, **caps))
    assert autograd.distillation(Heads(**tensors), options).isfinite()
