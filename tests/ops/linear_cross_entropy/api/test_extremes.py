"""Logits at the ends of the range, infinities and NaN: what torch gives."""

from dataclasses import replace

import pytest
import torch

from tests.support.loss import (
    HALVES,
    check,
    differentiate,
    fused,
    make_inputs,
    skip_unless_runnable,
    workspace_for,
)

# Triton's interpreter computes with numpy, which warns of inf - inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

BACKENDS = ["torch", "triton"]
REDUCTIONS = ["mean", "sum", "none"]


def small(device, backend, **options):
    skip_unless_runnable(backend, device, options.get("dtype", torch.float32))
    return make_inputs(7, 5, 11, device=device, ignored=0.2, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_logits_far_from_zero(device, offset, dtype, backend):
    inputs = small(device, backend, dtype=dtype, bias=True)
    bias = (inputs.linear_bias.detach() + offset).requires_grad_()
    inputs = replace(inputs, linear_bias=bias)
    check(differentiate(fused, inputs, backend=backend), inputs)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_of_ten_thousand(device, smoothing, reduction, backend):
    inputs = small(device, backend, scale=1e4)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    check(differentiate(fused, inputs, backend=backend, **options), inputs, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_class(device, reduction, backend):
    """A bias of -inf gives a class probability 0; nobody has it as target."""
    inputs = small(device, backend, bias=True)
    bias = inputs.linear_bias.detach().clone()
    bias[[2, 10]] = -torch.inf
    target = inputs.target.masked_fill((inputs.target == 2) | (inputs.target == 10), 3)
    inputs = replace(inputs, linear_bias=bias.requires_grad_(), target=target)
    result = differentiate(fused, inputs, reduction=reduction, backend=backend)
    check(result, inputs, reduction=reduction)
    assert result["linear_weight"][[2, 10]].eq(0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_masked_target(device, reduction, backend):
    inputs = small(device, backend, bias=True)
    bias = inputs.linear_bias.detach().clone()
    bias[2] = -torch.inf
    target = inputs.target.clone()
    target[1] = 2
    inputs = replace(inputs, linear_bias=bias.requires_grad_(), target=target)
    check(differentiate(fused, inputs, reduction=reduction, backend=backend), inputs, reduction=reduction)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("class_weight", [False, True])
def test_masked_class_with_smoothing_infinite(device, class_weight, backend):
    inputs = small(device, backend, bias=True, class_weight=class_weight)
    bias = inputs.linear_bias.detach().clone()
    bias[2] = -torch.inf
    inputs = replace(inputs, linear_bias=bias.requires_grad_())
    check(differentiate(fused, inputs, label_smoothing=0.1, backend=backend), inputs, label_smoothing=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_nonfinite_row_reaches_loss(device, value, reduction, backend):
    inputs = small(device, backend)
    x = inputs.input.detach().clone()
    x[2, 1] = value
    target = inputs.target.clone()
    target[2] = 4
    inputs = replace(inputs, input=x.requires_grad_(), target=target)
    result = differentiate(fused, inputs, reduction=reduction, backend=backend)
    check(result, inputs, reduction=reduction)
    assert not result["loss"].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_nonfinite_row_ignored(device, smoothing, reduction, backend):
    """Loss and other rows' gradients do not see it. (The weight's does: 0 * NaN, as in torch.)"""
    inputs = small(device, backend)
    frozen = replace(inputs, linear_weight=inputs.linear_weight.detach())
    frozen.target[2] = -100
    options = {"reduction": reduction, "label_smoothing": smoothing}
    garbage = frozen.input.detach().clone()
    garbage[2] = torch.nan
    result = differentiate(fused, replace(frozen, input=garbage.requires_grad_()), backend=backend, **options)
    result["input"][2] = 0
    check(result, frozen, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_cuda_target_out_of_range_gives_nan(device, reduction):
    if device == "cpu":
        pytest.skip("an IndexError there: test_errors.py")
    inputs = make_inputs(7, 5, 11, device=device, ignored=0.0)
    target = inputs.target.clone()
    target[3] = 11
    for foreign in (11, -1, 2**40):
        target[3] = foreign
        result = differentiate(fused, replace(inputs, target=target), reduction=reduction)
        assert result["loss"].isnan().any()
        assert result["input"][3].isnan().all()
        if reduction == "none":
            assert result["loss"].isnan().sum() == 1
            assert result["input"].isnan().any(1).sum() == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("std", [0.002, 0.02, 200.0])
@pytest.mark.parametrize("kind", ["classes", "probabilities", "z-loss"])
def test_float16_gradient_no_underflow(device, kind, std, backend):
    """Before its factor is known room is left for what a log-sum-exp or a row's probabilities may
    be: a small weight's rows would fall below float16's range by it."""
    skip_unless_runnable(backend, device, torch.float16)
    rows, features, classes = 100, 64, 600
    inputs = make_inputs(
        rows, features, classes, device=device, dtype=torch.float16, scale=std * features**0.5, ignored=0.0
    )
    if std > 1:
        inputs = replace(inputs, input=(inputs.input.detach() / 1000).requires_grad_())
    if kind == "probabilities":
        flat_NV = (0.5 * torch.randn(rows, classes)).softmax(1).half().to(device)
        inputs = replace(inputs, target=flat_NV)
    options = {"z_loss": 1.0} if kind == "z-loss" else {}
    actual = differentiate(fused, inputs, 1024.0, backend=backend, **options)
    check(actual, inputs, upstream=1024.0, **options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{"z_loss": 1.0}, {"label_smoothing": 1.0, "z_loss": 0.5, "softcap": 0.5}]
)
def test_float16_weight_gradient_no_underflow(device, options, backend):
    """Class by class it is rounded before its factor is known: few rows leave room for numbers that
    are far below the largest factor."""
    skip_unless_runnable(backend, device, torch.float16)
    inputs = make_inputs(9, 8, 400, device=device, dtype=torch.float16, scale=1.0)
    workspace = workspace_for(
        inputs, lambda plan: plan.weight_gradient == "class_blocks", backend=backend, **options
    )
    actual = differentiate(fused, inputs, 1024.0, backend=backend, workspace=workspace, **options)
    check(actual, inputs, upstream=1024.0, **options)
