"""Derivatives and transforms of a loss with row_weight."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import lowtide
from tests.ops.linear_cross_entropy import kinds
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.options.helpers import ALL, WARNINGS
from tests.ops.linear_cross_entropy.options.row_weight.helpers import weighted
from tests.ops.linear_cross_entropy.options.test_options import REDUCTIONS
from tests.support.loss import check, dense, differentiate, fused

pytestmark = WARNINGS


def small(device, kind):
    inputs, options = kinds.small(device, kind)
    row_weight = torch.linspace(-1, 1.5, 5, dtype=torch.float64, device=device)
    return replace(inputs, row_weight=row_weight), options


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_derivatives_first_and_second_order(device, reduction, kind):
    inputs, options = small(device, kind)
    loss, values = kinds.loss_of_leaves(inputs, reduction=reduction, **options)
    leaves = tuple(value.requires_grad_() for value in values)
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(loss, leaves, fast_mode=True)


@pytest.mark.parametrize("kind", kinds.KINDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("transform", ["grad", "jvp", "hessian", "create_graph"])
def test_transforms(device, transform, reduction, kind):
    inputs, options = small(device, kind)

    def transformed(loss_of):
        loss, values = kinds.loss_of_leaves(inputs, loss_of, reduction=reduction, **options)
        places = tuple(range(len(values)))
        if transform == "jvp":
            return torch.func.jvp(loss, values, tuple(value.cos() for value in values))
        if transform == "create_graph":
            leaves = [value.requires_grad_() for value in values]
            first = torch.autograd.grad(loss(*leaves).sum(), leaves, create_graph=True)
            return torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        if transform == "grad":
            return torch.func.grad(lambda *leaves: loss(*leaves).sum(), places)(*values)
        hessian = torch.func.hessian(lambda *leaves: loss(*leaves).sum(), (0, 1))(*values)
        return [block for row in hessian for block in row]

    kinds.assert_close(transformed(fused), transformed(dense))


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (2,)])
def test_vmap_over_weights(device, positions, reduction):
    call = make_call(positions, device=device, ignored=-100)
    x, w, target = call["input"], call["linear_weight"], call["target"]
    weights = torch.randn(3, *target.shape, dtype=torch.float64, device=device)

    def loss(x, row_weight):
        return lowtide.linear_cross_entropy(x, w, target, row_weight=row_weight, reduction=reduction).sum()

    found = torch.vmap(torch.func.grad_and_value(loss), (None, 0))(x, weights)
    for k, row_weight in enumerate(weights):
        leaf = x.detach().requires_grad_()
        value = loss(leaf, row_weight)
        (gradient,) = torch.autograd.grad(value, leaf)
        kinds.assert_close([each[k] for each in found], [gradient, value])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_checkpointing(device, reduction):
    inputs, options = weighted(device=device, kind="all, classes")
    expected = differentiate(fused, inputs, 0.3, reduction=reduction, **options)
    names = list(inputs.leaves())

    def loss(row_weight, *leaves):
        changed = replace(inputs, row_weight=row_weight * 1, **dict(zip(names, leaves)))
        return fused(changed, reduction=reduction, **options)

    leaves = inputs.leaves().values()
    value = checkpoint(loss, inputs.row_weight, *leaves, use_reentrant=False)
    found = torch.autograd.grad(value, list(leaves), torch.full_like(value, 0.3))
    for name, each in zip(names, found):
        assert torch.equal(each, expected[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *ALL])
def test_retained_graph_exact(device, kind, reduction):
    inputs, options = weighted(device=device, dtype=torch.bfloat16, kind=kind)
    loss, leaves = fused(inputs, reduction=reduction, **options), inputs.leaves()
    for last, upstream in ((False, 0.3), (False, -2.0), (True, 0.3)):
        seed = torch.full_like(loss, upstream)
        found = torch.autograd.grad(loss, tuple(leaves.values()), seed, retain_graph=not last)
        check(
            {"loss": loss.detach(), **dict(zip(leaves, found))},
            inputs,
            upstream=upstream,
            reduction=reduction,
            **options,
        )
