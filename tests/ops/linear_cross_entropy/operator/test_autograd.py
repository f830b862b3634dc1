"""The autograd contract: scaled, repeated, partial and hooked backward passes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.support.loss import (
    HALVES,
    Inputs,
    check,
    dense,
    differentiate,
    fused,
    make_inputs,
    no_synchronisation,
    norm,
)

REDUCTIONS = ["mean", "sum", "none"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def gradients(loss, inputs, **options):
    leaves = inputs.leaves()
    return dict(zip(leaves, torch.autograd.grad(loss, tuple(leaves.values()), **options)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("factor", [1.0, 3.0, -0.37, 1 / 7, 0.0, 2.0**-10])
def test_loss_scaled(device, factor, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    by_seed = differentiate(fused, inputs, factor, reduction=reduction)
    check(by_seed, inputs, upstream=factor, reduction=reduction)
    loss = fused(inputs, reduction=reduction)
    for name, gradient in gradients(loss * factor, inputs).items():
        assert torch.equal(gradient, by_seed[name]), name
    if factor:
        divided = gradients(fused(inputs, reduction=reduction) / (1 / factor), inputs)
        check({"loss": by_seed["loss"], **divided}, inputs, upstream=factor, reduction=reduction)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_loss_changed_in_place(device, reduction):
    inputs = make_inputs(device=device, bias=True)
    loss = fused(inputs, reduction=reduction)
    result = {"loss": loss.detach().clone()}
    loss *= -3.0
    check(result | gradients(loss.sum(), inputs), inputs, upstream=-3.0, reduction=reduction)


def test_loss_added_to_another(device):
    inputs = make_inputs(device=device, dtype=torch.float64, bias=True)
    penalty = sum(leaf.square().sum() for leaf in inputs.leaves().values())
    total = gradients(fused(inputs) + penalty, inputs)
    alone = differentiate(fused, inputs)
    for name, leaf in inputs.leaves().items():
        torch.testing.assert_close(total[name], alone[name] + 2 * leaf.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_retained_graph_exact(device, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    loss = fused(inputs, reduction=reduction)
    for last, upstream in ((False, 0.3), (False, -2.0), (False, 0.3), (True, 1.7)):
        seed = torch.full_like(loss, upstream)
        result = gradients(loss, inputs, grad_outputs=seed, retain_graph=not last)
        check({"loss": loss.detach(), **result}, inputs, upstream=upstream, reduction=reduction)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_later_backward_keeps_earlier_gradients(device, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    loss = fused(inputs, reduction=reduction).sum()
    first = gradients(loss, inputs, retain_graph=True)
    copies = {name: gradient.clone() for name, gradient in first.items()}
    gradients(2 * loss, inputs, retain_graph=True)
    gradients(3 * loss, inputs)
    for name, gradient in first.items():
        assert torch.equal(gradient, copies[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_freed_graph_raises(device, reduction):
    inputs = make_inputs(device=device)
    loss = fused(inputs, reduction=reduction).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "names",
    [("input",), ("linear_weight",), ("linear_bias",), ("input", "linear_bias"), ("linear_weight", "input")],
)
def test_gradients_of_subset(device, names, dtype, reduction):
    """By asking for some of them, and by freezing the others."""
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    everything = differentiate(fused, inputs, reduction=reduction)
    loss = fused(inputs, reduction=reduction)
    asked = torch.autograd.grad(loss.sum(), tuple(getattr(inputs, name) for name in names))
    frozen = replace(
        inputs, **{name: leaf.detach() for name, leaf in inputs.leaves().items() if name not in names}
    )
    result = differentiate(fused, frozen, reduction=reduction)
    check(result, frozen, reduction=reduction)
    for name, gradient in zip(names, asked):
        assert torch.equal(gradient, everything[name]), name


def test_inputs_without_gradient_plain_loss(device):
    inputs = make_inputs(device=device)
    loss = fused(replace(inputs, input=inputs.input.detach(), linear_weight=inputs.linear_weight.detach()))
    assert not loss.requires_grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hooks_once(device, reduction):
    inputs = make_inputs(device=device, bias=True)
    expected = differentiate(fused, inputs, reduction=reduction)
    seen, accumulated = {}, []
    for name, leaf in inputs.leaves().items():
        leaf.register_hook(lambda gradient, name=name: seen.setdefault(name, []).append(gradient.clone()))
        leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: accumulated.append(name))
    fused(inputs, reduction=reduction).sum().backward()
    assert sorted(accumulated) == sorted(inputs.leaves())
    for name in inputs.leaves():
        assert len(seen[name]) == 1
        assert torch.equal(seen[name][0], expected[name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_hook_changes_gradient(device, reduction):
    inputs = make_inputs(device=device)
    expected = differentiate(fused, inputs, reduction=reduction)
    inputs.linear_weight.register_hook(lambda gradient: -2 * gradient)
    fused(inputs, reduction=reduction).sum().backward()
    assert torch.equal(inputs.linear_weight.grad, -2 * expected["linear_weight"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradients_accumulate(device, reduction, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    other = replace(make_inputs(device=device, dtype=dtype), **inputs.leaves())
    steps = [differentiate(fused, each, reduction=reduction) for each in (inputs, other)]
    for each in (inputs, other):
        fused(each, reduction=reduction).sum().backward()
    for name, leaf in inputs.leaves().items():
        assert torch.equal(leaf.grad, steps[0][name] + steps[1][name]), name


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_tied_embedding(device, reduction):
    """One parameter as embedding and as head: its gradient is the sum of both."""
    embedding = nn.Parameter(torch.randn(21, 8, dtype=torch.float64, device=device))
    tokens, target = torch.randint(21, (2, 3, 5), device=device)
    pair = []
    for loss_of in (fused, dense):
        hidden = nn.functional.embedding(tokens, embedding).tanh()
        loss = loss_of(Inputs(hidden, embedding, target), reduction=reduction)
        pair.append(torch.autograd.grad(loss.sum(), embedding)[0])
    torch.testing.assert_close(pair[0], pair[1], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "zeros", "some zeros", "strided", "expanded"])
def test_upstream_of_rows(device, kind, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True)
    N = inputs.target.numel()
    upstream = {
        "random": lambda: torch.randn(N),
        "zeros": lambda: torch.zeros(N),
        "some zeros": lambda: torch.randn(N) * (torch.rand(N) < 0.5),
        "strided": lambda: torch.randn(N, 2)[:, 1],
        "expanded": lambda: torch.tensor(0.3).expand(N),
    }[kind]().to(device)
    result = differentiate(fused, inputs, upstream, reduction="none")
    check(result, inputs, upstream=upstream, reduction="none")
    if kind == "zeros":
        for name, leaf in inputs.leaves().items():
            assert torch.equal(result[name], torch.zeros_like(leaf)), name


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_upstream_in_shape_of_target(device, reduction):
    inputs = make_inputs(24, device=device)
    shaped = replace(
        inputs,
        input=inputs.input.detach().view(2, 3, 4, -1).requires_grad_(),
        target=inputs.target.view(2, 3, 4),
    )
    upstream = torch.randn(2, 3, 4, device=device) if reduction == "none" else 1.0
    check(
        differentiate(fused, shaped, upstream, reduction=reduction),
        shaped,
        upstream=upstream,
        reduction=reduction,
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_grad_same_loss(device, reduction, mode):
    inputs = make_inputs(device=device, bias=True)
    expected = fused(inputs, reduction=reduction)
    with mode():
        loss = fused(inputs, reduction=reduction)
        if mode is torch.inference_mode:
            fresh = make_inputs(device=device)
            assert fused(fresh, reduction=reduction).isfinite().all()
    assert not loss.requires_grad
    assert norm(loss - expected.detach()) <= torch.finfo(torch.float32).eps * norm(expected.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_same_call_same_bits(device, reduction, dtype):
    inputs = make_inputs(111, 63, 507, device=device, dtype=dtype, bias=True, class_weight=True)
    first = differentiate(fused, inputs, 0.3, reduction=reduction, label_smoothing=0.1)
    for _ in range(3):
        again = differentiate(fused, inputs, 0.3, reduction=reduction, label_smoothing=0.1)
        for name, tensor in first.items():
            assert torch.equal(tensor, again[name]), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_device_sync(device, reduction, smoothing, dtype):
    inputs = make_inputs(device=device, dtype=dtype, bias=True, class_weight=True)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    upstream = torch.rand(inputs.target.shape if reduction == "none" else (), device=device)
    differentiate(fused, inputs, upstream, **options)  # kernels are compiled, libraries loaded
    with no_synchronisation(device):
        result = differentiate(fused, inputs, upstream, **options)
    check(result, inputs, upstream=upstream, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["shifted", "four dimensions", "expanded"])
def test_no_device_sync_any_strides(device, layout, dtype):
    hidden = torch.randn(2, 3, 9, 16, device=device).to(dtype)
    input = {
        "shifted": hidden[0, :, :-1],
        "four dimensions": hidden[:, :, :-1],
        "expanded": hidden[0, 0, :1].expand(24, 16),
    }[layout].detach()
    inputs = make_inputs(1, 16, 63, device=device, dtype=dtype)
    inputs = replace(
        inputs, input=input.requires_grad_(), target=torch.randint(63, input.shape[:-1], device=device)
    )
    upstream = torch.ones((), device=device)
    differentiate(fused, inputs, upstream)
    with no_synchronisation(device):
        result = differentiate(fused, inputs, upstream)
    check(result, inputs)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_tensors_not_on_current_device(reduction, dtype):
    inputs = make_inputs(37, 24, 101, device="cuda:1", dtype=dtype)
    assert torch.cuda.current_device() == 0
    check(differentiate(fused, inputs, reduction=reduction), inputs, reduction=reduction)
