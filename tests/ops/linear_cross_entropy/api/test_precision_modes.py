"""Autocast, and the ends of float16's range."""

from dataclasses import replace

import pytest
import torch

from tests.support.loss import (
    HALVES,
    budget,
    check,
    dense,
    differentiate,
    fused,
    magnitudes,
    make_inputs,
    norm,
)

REDUCTIONS = ["mean", "sum", "none"]


def operands(inputs, dtype):
    """In float64, the numbers that the products see."""
    changed = {
        name: getattr(inputs, name)
        .detach()
        .to(dtype)
        .double()
        .requires_grad_(getattr(inputs, name).requires_grad)
        for name in ("input", "linear_weight")
    }
    return replace(inputs.to(torch.float64), **changed)


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("leaves", ["input", "linear_weight", "all"])
def test_autocast(device, leaves, reduction, dtype, input_dtype):
    """A float32 loss, gradients in the dtype of each leaf, and errors no larger than autocast makes
    them. The operands are cast as autocast does on CUDA; on the CPU products are in float32."""
    inputs = make_inputs(device=device, bias=True, class_weight=True)
    inputs = replace(inputs, input=inputs.input.detach().to(input_dtype).requires_grad_())
    if leaves != "all":
        frozen = {name: leaf.detach() for name, leaf in inputs.leaves().items() if name != leaves}
        inputs = replace(inputs, **frozen)
    with torch.autocast(device, dtype=dtype):
        result = differentiate(fused, inputs, 0.7, reduction=reduction)
        outside = fused(inputs, reduction=reduction)
    seed = torch.full_like(outside, 0.7)
    later = torch.autograd.grad(
        outside, tuple(inputs.leaves().values()), seed
    )  # backward outside of autocast
    assert result["loss"].dtype == torch.float32

    rounded = operands(inputs, dtype if device == "cuda" else torch.float32)
    exact = differentiate(dense, rounded, 0.7, reduction=reduction)
    magnitude = magnitudes(rounded, 0.7, reduction=reduction)
    # With autocast, torch makes operands and the gradients of its products in half precision.
    with torch.autocast(device, dtype=dtype):
        logits_NV = torch.nn.functional.linear(inputs.input, inputs.linear_weight, inputs.linear_bias)
        loss = torch.nn.functional.cross_entropy(
            logits_NV.float(), inputs.target, weight=inputs.weight, reduction=reduction
        )
    eager = dict(zip(inputs.leaves(), torch.autograd.grad(loss, tuple(inputs.leaves().values()), seed)))
    eager["loss"] = loss.detach()
    for name, got in result.items():
        allowed = budget(eager[name], exact[name], magnitude[name], factor=2, dtype=torch.float32)
        error = norm(got.double() - exact[name])
        assert error <= allowed, f"{name}: error {error:.3e} exceeds its budget {allowed:.3e}"
    for (name, leaf), gradient in zip(inputs.leaves().items(), later):
        assert gradient.dtype == result[name].dtype == leaf.dtype
        assert torch.equal(gradient, result[name]), name


def test_autocast_keeps_float64(device):
    inputs = make_inputs(device=device, dtype=torch.float64)
    plain = differentiate(fused, inputs)
    with torch.autocast(device, dtype=torch.bfloat16):
        cast = differentiate(fused, inputs)
    for name, tensor in plain.items():
        assert torch.equal(cast[name], tensor), name


@pytest.mark.parametrize("upstream", [65536.0, 1.0, 2.0**-10])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_float16_with_loss_scale(device, ignored, reduction, upstream):
    """Where the gradients themselves are in range, no step on the way to them is out of it."""
    inputs = make_inputs(512, 19, 1000, device=device, dtype=torch.float16, ignored=ignored, scale=1.0)
    if reduction != "mean":
        upstream /= 512
    exact = differentiate(dense, inputs.to(torch.float64), upstream, reduction=reduction)
    result = differentiate(fused, inputs, upstream, reduction=reduction)
    for name in inputs.leaves():
        rounded = exact[name].half().double()
        allowed = 1.1 * norm(rounded - exact[name]) * (1 if device == "cpu" else 2)
        error = norm(result[name].double() - exact[name])
        assert error <= allowed, f"{name}: error {error:.3e}, its rounding alone is {allowed:.3e}"


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e4])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_float16_with_any_class_weight(device, reduction, size):
    """Class weights in float32, so small or large that p - 1 times one leaves float16."""
    inputs = make_inputs(64, 19, 63, device=device, dtype=torch.float16, class_weight=True)
    inputs = replace(inputs, weight=inputs.weight.float() * size)
    upstream = 1.0 if reduction == "mean" else 1 / size
    check(
        differentiate(fused, inputs, upstream, reduction=reduction),
        inputs,
        upstream=upstream,
        reduction=reduction,
    )


def test_grad_scaler_unscales(device):
    weight = torch.randn(63, 19, device=device).requires_grad_()
    inputs = make_inputs(device=device, dtype=torch.float32)
    inputs = replace(inputs, linear_weight=weight)
    with torch.autocast(device, dtype=torch.float16):
        plain = differentiate(fused, inputs)
    scaler = torch.amp.GradScaler(device, init_scale=65536.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with torch.autocast(device, dtype=torch.float16):
        loss = fused(inputs)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(weight.grad, plain["linear_weight"])


def test_float16_with_tiny_upstream(device):
    """1e-36 is 0 in float16, as it is in eager torch; not NaN, however it is scaled on the way."""
    inputs = make_inputs(device=device, dtype=torch.float16)
    upstream = torch.full(inputs.leading, 1e-36, device=device)
    for gradient in list(differentiate(fused, inputs, upstream, reduction="none").values())[1:]:
        assert gradient.eq(0).all()
