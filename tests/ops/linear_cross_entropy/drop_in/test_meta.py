"""Tensors without data: shapes and dtypes, as torch gives them, and the gradients'."""

from dataclasses import replace

import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.calls import REDUCTIONS, make_call, outcome
from tests.ops.linear_cross_entropy.kinds import KINDS
from tests.support.loss import fused, fused_log_probs, make_inputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("positions", [(), (2, 3)])
def test_meta_matches_data(positions, probabilities, reduction, dtype):
    arguments = make_call(positions, dtype=dtype, bias=True, class_weight=True, probabilities=probabilities)
    without = {name: tensor.to("meta") for name, tensor in arguments.items()}
    leaves = ("input", "linear_weight", "linear_bias")
    expected, found = (
        outcome(lowtide.linear_cross_entropy, each, leaves, reduction=reduction, label_smoothing=0.1)
        for each in (arguments, without)
    )
    for name, tensor in expected.items():
        assert found[name].is_meta
        assert (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_meta_every_option(kind, autocast):
    """Under autocast, which knows no such device, as well."""
    made, options = KINDS[kind]
    inputs = make_inputs(**made)
    tensors = {
        name: tensor.detach().to("meta") for name, tensor in vars(inputs).items() if tensor is not None
    }
    with torch.autocast("cpu", enabled=autocast):
        assert fused(replace(inputs, **tensors), **options).shape == ()
        assert torch.func.grad(lambda x: fused(replace(inputs, **tensors | {"input": x}), **options))(
            tensors["input"]
        ).shape == (37, 19)


def test_meta_log_probs():
    inputs = make_inputs(bias=True)
    tensors = {name: tensor.to("meta") for name, tensor in vars(inputs).items() if tensor is not None}
    expected, found = fused_log_probs(inputs), fused_log_probs(replace(inputs, **tensors))
    for ours, theirs in zip(found, expected):
        assert ours.is_meta
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)


def test_meta_huge_model():
    """A batch of 2**40 logits."""
    x, w = (torch.empty(1 << 20, 1 << 12, device="meta", requires_grad=True) for _ in range(2))
    target = torch.empty(1 << 20, dtype=torch.long, device="meta")
    loss = lowtide.linear_cross_entropy(x, w, target)
    assert [gradient.shape for gradient in torch.autograd.grad(loss, (x, w))] == [x.shape, w.shape]
