"""The definition itself, against F.cross_entropy(F.linear(...)) and finite differences."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.loss import Inputs, differentiate, fused, make_inputs

OPTIONS = list(
    itertools.product(("mean", "sum", "none"), (False, True), (False, True), (0.0, 0.2), (-100, 3))
)


@pytest.mark.parametrize(("reduction", "bias", "class_weight", "smoothing", "ignore_index"), OPTIONS)
def test_reference_matches_torch(device, reduction, bias, class_weight, smoothing, ignore_index):
    inputs = make_inputs(
        11,
        5,
        7,
        device=device,
        dtype=torch.float64,
        bias=bias,
        class_weight=class_weight,
        ignore_index=ignore_index,
    )
    options = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignore_index}

    def composed(inputs):
        logits_NV = F.linear(inputs.input, inputs.linear_weight, inputs.linear_bias)
        return F.cross_entropy(logits_NV, inputs.target, weight=inputs.weight, **options)

    expected = differentiate(composed, inputs)
    actual = differentiate(fused, inputs, backend="reference", **options)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_leading_dimensions(device, shape, reduction):
    x = torch.randn(*shape, 5, dtype=torch.float64, device=device)
    w = torch.randn(7, 5, dtype=torch.float64, device=device)
    target = torch.randint(7, shape, device=device, dtype=torch.int32)
    loss = fused(Inputs(x, w, target), backend="reference", reduction=reduction)
    expected = F.cross_entropy((x @ w.t()).view(-1, 7), target.long().view(-1), reduction=reduction)
    assert loss.shape == (shape if reduction == "none" else ())
    torch.testing.assert_close(loss.flatten(), expected.flatten(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_widened_first(device, dtype):
    inputs = make_inputs(9, 5, 7, device=device, dtype=dtype)
    loss = fused(inputs, backend="reference")
    assert loss.dtype == torch.float32
    assert torch.equal(loss, fused(inputs.to(torch.float32), backend="reference"))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_derivatives_first_and_second_order(reduction, smoothing):
    inputs = make_inputs(5, 3, 4, dtype=torch.float64, bias=True, class_weight=True)

    def loss(input, linear_weight, linear_bias):
        changed = Inputs(input, linear_weight, inputs.target, linear_bias, inputs.weight)
        return fused(changed, backend="reference", reduction=reduction, label_smoothing=smoothing)

    leaves = tuple(inputs.leaves().values())
    assert torch.autograd.gradcheck(loss, leaves)
    assert torch.autograd.gradgradcheck(loss, leaves)
