"""Class probabilities for targets: of any dtype and strides, certain ones, their gradients."""

from dataclasses import replace

import pytest
import torch

from tests.ops.linear_cross_entropy.options.test_options import (
    DTYPES,
    KINDS,
    REDUCTIONS,
    check_fused,
    workspace_of,
)
from tests.support.loss import check, differentiate, fused, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities_one_hot_match_class(device, reduction):
    inputs = make_inputs(device=device, dtype=torch.float64, class_weight=True, ignored=0.0)
    certain = replace(inputs, target=torch.nn.functional.one_hot(inputs.target, 63).double())
    if reduction == "mean":  # the mean is over rows, not over class weights, as in torch
        inputs, certain = (replace(each, weight=None) for each in (inputs, certain))
    expected = differentiate(fused, inputs, reduction=reduction, label_smoothing=0.1)
    found = differentiate(fused, certain, reduction=reduction, label_smoothing=0.1)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("target_dtype", DTYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_of_other_dtype(device, dtype, target_dtype):
    inputs = make_inputs(device=device, dtype=dtype, probabilities=True)
    inputs = replace(inputs, target=inputs.target.to(target_dtype))
    actual = differentiate(fused, inputs)
    assert actual["loss"].dtype == torch.promote_types(inputs.sum_dtype, target_dtype)
    check(actual | {"loss": actual["loss"].to(inputs.sum_dtype)}, inputs)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("layout", ["classes first", "expanded", "sliced"])
def test_probabilities_of_any_strides(device, layout, reduction):
    inputs = make_inputs(device=device, probabilities=True)
    target = {
        "classes first": lambda: inputs.target.t().contiguous().t(),
        "expanded": lambda: inputs.target[0].expand(37, 63),
        "sliced": lambda: torch.rand(37, 2, 126, device=device)[:, 1, ::2],
    }[layout]()
    inputs = replace(inputs, target=target)
    check_fused(inputs, reduction=reduction, workspace=workspace_of("few", inputs, reduction=reduction))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities_not_normalised(device, reduction):
    """torch takes them as they are: of any sum, also below zero."""
    inputs = make_inputs(device=device, dtype=torch.float64, probabilities=True)
    check_fused(replace(inputs, target=torch.randn_like(inputs.target)), reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["probabilities", "smoothed probabilities", "all, probabilities"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_of_probabilities_and_class_weights(device, reduction, kind, dtype):
    made, options = KINDS[kind]
    inputs = make_inputs(device=device, dtype=dtype, **made)
    inputs.target.requires_grad_()
    if inputs.weight is not None:
        inputs.weight.requires_grad_()
    upstream = torch.randn(inputs.leading, device=device) if reduction == "none" else -0.7
    workspace = workspace_of("few", inputs, reduction=reduction, **options)
    check_fused(inputs, upstream, reduction=reduction, workspace=workspace, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_probabilities_zero_on_masked_class(device, reduction):
    """0 times infinity, in torch and here: the loss is NaN, the gradients are not."""
    inputs = make_inputs(7, 5, 11, device=device, dtype=torch.float64, bias=True, probabilities=True)
    bias, target = inputs.linear_bias.detach().clone(), inputs.target.clone()
    bias[3], target[:, 3] = -torch.inf, 0
    inputs = replace(inputs, linear_bias=bias.requires_grad_(), target=target)
    for options in ({}, {"label_smoothing": 0.1}):
        check_fused(inputs, reduction=reduction, **options)


# z-loss.
