"""What weights of rows do: 1, 0, of any size and dtype, without rows or classes, with K dimensions.

Shapes: N tokens.
"""

from dataclasses import replace

import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.calls import make_call
from tests.ops.linear_cross_entropy.options.helpers import ALL, WARNINGS
from tests.ops.linear_cross_entropy.options.row_weight.helpers import weighted
from tests.ops.linear_cross_entropy.options.test_options import DTYPES, REDUCTIONS, check_fused
from tests.support.loss import HALVES, check, differentiate, fused

pytestmark = WARNINGS


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["plain", *ALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_1(device, dtype, kind, reduction):
    inputs, options = weighted(device=device, dtype=dtype, kind=kind)
    one, none = (replace(inputs, row_weight=each) for each in (torch.ones_like(inputs.row_weight), None))
    found, expected = (differentiate(fused, each, reduction=reduction, **options) for each in (one, none))
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ALL)
def test_weight_of_0(device, kind, reduction):
    inputs, options = weighted(device=device, kind=kind)
    found = differentiate(fused, inputs, reduction=reduction, **options)
    none_N = inputs.row_weight == 0
    assert none_N.sum() > 2
    assert not found["input"][none_N].any()
    if reduction == "none":
        assert not found["loss"][none_N].any()


def test_mean_denominator_without_weights(device):
    for class_weight in (False, True):
        inputs, _ = weighted(device=device, dtype=torch.float64, class_weight=class_weight)
        counted_N = inputs.target >= 0
        divisor = inputs.weight[inputs.target[counted_N]].sum() if class_weight else counted_N.sum()
        mean, total = (fused(inputs, reduction=reduction) for reduction in ("mean", "sum"))
        torch.testing.assert_close(mean, total / divisor, rtol=1e-13, atol=0)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weight_of_ignored_row_not_used(device, reduction):
    inputs, options = weighted(device=device, kind="all, classes")
    assert inputs.row_weight.isnan().any()
    for backend in ("auto", "reference"):
        found = differentiate(fused, inputs, reduction=reduction, backend=backend, **options)
        assert all(each.isfinite().all() for each in found.values())


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_valid_rows(device, reduction):
    inputs, _ = weighted(9, device=device, ignored=1.0)
    found = differentiate(fused, inputs, reduction=reduction)
    loss = found.pop("loss")
    assert loss.isnan() if reduction == "mean" else not loss.any()
    assert not any(each.any() for each in found.values())


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("weights", DTYPES)
def test_weights_of_other_dtype(device, weights, reduction):
    """The loss keeps its own dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs, _ = weighted(device=device, dtype=dtype)
        inputs = replace(inputs, row_weight=inputs.row_weight.to(weights))
        found = differentiate(fused, inputs, -0.7, reduction=reduction)
        wide = replace(inputs, row_weight=inputs.row_weight.float())
        check(found, wide, upstream=-0.7, reduction=reduction)


@pytest.mark.parametrize("magnitude", [1e-6, 1e5])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_weights_of_any_size(device, reduction, dtype, magnitude):
    """A float16 gradient is formed near the middle of its range."""
    inputs, _ = weighted(device=device, dtype=dtype)
    inputs = replace(inputs, row_weight=inputs.row_weight.float() * magnitude)
    upstream = 0.1 / magnitude
    found = differentiate(fused, inputs, upstream, reduction=reduction)
    check(found, inputs, upstream=upstream, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ALL)
def test_leading_dimensions_and_strides(device, kind, reduction):
    for leading in ((), (1,), (2, 3), (2, 0)):
        N = torch.Size(leading).numel()
        inputs, options = weighted(N, 5, 7, device=device, kind=kind, ignored=0.0)
        target = inputs.target.view(*leading, 7) if inputs.probabilities else inputs.target.view(leading)
        row_weight = torch.randn(*leading, 2, device=device)[..., 0]
        x = inputs.input.detach().view(*leading, 5).requires_grad_()
        changed = replace(inputs, input=x, target=target, row_weight=row_weight)
        check_fused(changed, reduction=reduction, **options)
        check_fused(
            replace(changed, row_weight=torch.randn((), device=device).expand(leading)),
            reduction=reduction,
            **options,
        )


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("positions", [(), (2,)])
def test_no_classes(device, positions, reduction):
    """Without classes the loss of a row is 0, whatever its weight."""
    x, w = torch.randn(3, 2, device=device), torch.randn(0, *positions, 2, device=device)
    row_weight = torch.tensor([torch.nan, 0.5, 2.0], device=device)
    row_weight = row_weight.view(3, *(1 for _ in positions)).expand(3, *positions)
    ignored = torch.full((3, *positions), -100, device=device)
    probabilities = torch.ones(3, 0, *positions, device=device)
    for target, weight in ((ignored, row_weight), (probabilities, row_weight.nan_to_num(1))):
        if positions and target is ignored:
            continue  # an error, as in torch
        found = lowtide.linear_cross_entropy(x, w, target, reduction=reduction, row_weight=weight)
        expected = lowtide.linear_cross_entropy(x, w, target, reduction=reduction)
        assert torch.equal(found.isnan(), expected.isnan())
        assert not found.nan_to_num().any()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("probabilities", [False, True])
@pytest.mark.parametrize("positions", [(1,), (3,), (2, 2)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_positions(device, reduction, positions, probabilities, backend):
    """One weight for each row and position."""
    made = {"bias": True, "class_weight": True, "probabilities": probabilities}
    call = make_call(positions, device=device, ignored=None if probabilities else -100, **made)
    options = {"label_smoothing": 0.1, "weight": call["weight"], "linear_bias": call["linear_bias"]}
    row_weight = torch.randn(6, *positions, dtype=torch.float64, device=device)
    counted = torch.ones_like(row_weight)
    if not probabilities:
        row_weight[call["target"] == -100] = torch.nan
        counted = call["weight"][call["target"].clamp(min=0)] * (call["target"] != -100)
    leaves = [call[name].requires_grad_() for name in ("input", "linear_weight")]
    plain = lowtide.linear_cross_entropy(*leaves, call["target"], reduction="none", **options)
    expected = plain * row_weight.nan_to_num(0)
    if reduction != "none":
        expected = expected.sum() / (counted.sum() if reduction == "mean" else 1)
    found = lowtide.linear_cross_entropy(
        *leaves, call["target"], reduction=reduction, row_weight=row_weight, backend=backend, **options
    )
    upstream = torch.randn_like(expected)
    ours, theirs = ((each, *torch.autograd.grad(each, leaves, upstream)) for each in (found, expected))
    for one, other in zip(ours, theirs):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)
