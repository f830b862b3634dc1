"""In autocast, a CUDA graph, another thread, another Function; copied as a module."""

import contextlib
import copy
import io
import pickle
import threading
from dataclasses import replace

import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.kinds import KINDS, REDUCTIONS
from tests.support.cuda_graphs import captured
from tests.support.loss import (
    Inputs,
    check,
    differentiate,
    fused,
    make_inputs,
    no_synchronisation,
)


@pytest.mark.parametrize("cast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["outside", "inside", "backward too"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_transforms_autocast(device, reduction, place, cast):
    """As if the operands had been cast (on the CPU, where products are in float32, as if they had
    not). The gradients have the parameters' own dtypes."""
    inputs = make_inputs(device=device, bias=True, logit_scale=True)
    with torch.no_grad():
        inputs.linear_bias.copy_(inputs.linear_bias.to(cast))
    rounded = replace(inputs.to(cast), logit_scale=inputs.logit_scale)
    same = rounded if device == "cuda" or place == "inside" else inputs
    expected = differentiate(fused, same, 0.3, reduction=reduction)

    def loss_of(inputs, **options):
        with torch.autocast(device, dtype=cast):
            return fused(inputs, **options)

    if place == "outside":
        found = differentiate(loss_of, inputs, 0.3, reduction=reduction)
    elif place == "backward too":
        with torch.autocast(device, dtype=cast):
            found = differentiate(fused, inputs, 0.3, reduction=reduction)
    else:
        # Tensors that autocast has made, in code that autocast has left.
        with torch.autocast(device, dtype=cast), torch.autocast(device, enabled=False):
            found = differentiate(fused, rounded, 0.3, reduction=reduction)
    assert found["loss"].dtype == torch.float32
    torch.testing.assert_close(found["loss"], expected["loss"], rtol=1e-6, atol=1e-6)
    for name, leaf in (rounded if place == "inside" else inputs).leaves().items():
        assert found[name].dtype == leaf.dtype, name
        scale = expected[name].float().abs().max().item()
        eps = torch.finfo(cast).eps
        torch.testing.assert_close(found[name].float(), expected[name].float(), rtol=eps, atol=eps * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_transforms_cuda_graph(device, reduction, dtype):
    """Captured once, forward and backward, and played for other data in the same memory."""
    if device == "cpu":
        pytest.skip("needs CUDA graphs")
    inputs = make_inputs(device=device, dtype=dtype, bias=True, logit_scale=True)
    leaves = tuple(inputs.leaves().values())

    def step():
        loss = fused(inputs, reduction=reduction, softcap=3.0, z_loss=0.1)
        return loss.detach(), *torch.autograd.grad(loss.sum(), leaves)

    graph, found = captured(step)
    for seed in (1, 2):
        torch.manual_seed(seed)
        other = make_inputs(device=device, dtype=dtype, bias=True, logit_scale=True)
        with torch.no_grad():
            inputs.target.copy_(other.target)
            for leaf, new in zip(leaves, other.leaves().values()):
                leaf.copy_(new)
        graph.replay()
        assert all(map(torch.equal, found, step()))


def test_transforms_no_device_sync(device):
    for kind in KINDS:
        made, options = KINDS[kind]
        inputs = make_inputs(device=device, **made)
        for reduction in REDUCTIONS:
            upstream = torch.ones((37,) if reduction == "none" else (), device=device)
            differentiate(fused, inputs, upstream, reduction=reduction, **options)
            with no_synchronisation(device):
                result = differentiate(fused, inputs, upstream, reduction=reduction, **options)
            check(result, inputs, reduction=reduction, **options)


def saved(criterion):
    buffer = io.BytesIO()
    torch.save(criterion, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), saved])
@pytest.mark.parametrize("out_features", [(), (2, 3)])
def test_transforms_of_module_copies(device, out_features, way):
    """With every option, after it has run; the copy trains by itself."""
    criterion = lowtide.LinearCrossEntropyLoss(
        8, 7, out_features=out_features, bias=True, weight=torch.rand(7), label_smoothing=0.1, softcap=3.0,
        logit_scale=0.5, z_loss=0.1, ignore_index=2, reduction="sum", device="cpu",
    ).to(device)  # fmt: skip
    hidden, target = torch.randn(5, 8, device=device), torch.randint(7, (5, *out_features), device=device)
    expected = criterion(hidden, target)
    expected.backward()
    other = way(criterion)
    found = other(hidden, target)
    assert torch.equal(found, expected)
    other.zero_grad()
    found.backward()
    for theirs, ours in zip(criterion.parameters(), other.parameters()):
        assert torch.equal(theirs.grad, ours.grad)
        assert theirs.data_ptr() != ours.data_ptr()


def test_transforms_in_threads(device):
    """Backward in another thread than forward, which sees none of its modes."""
    inputs = make_inputs(device=device)
    expected = differentiate(fused, inputs)
    loss, found = fused(inputs), []
    leaves = (inputs.input, inputs.linear_weight)
    with torch.no_grad(), contextlib.suppress(RuntimeError):
        thread = threading.Thread(target=lambda: found.extend(torch.autograd.grad(loss, leaves)))
        thread.start()
        thread.join()
    for gradient, leaf in zip(found, ("input", "linear_weight"), strict=True):
        assert torch.equal(gradient, expected[leaf])


def test_transforms_in_autograd_function(device):
    """Called with gradients on in another Function's forward, as chunked training code does."""

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            with torch.enable_grad():
                leaves = (x.detach().requires_grad_(), w.detach().requires_grad_())
                loss = fused(Inputs(*leaves, inputs.target))
                ctx.save_for_backward(*torch.autograd.grad(loss, leaves))
            return loss.detach()

        @staticmethod
        def backward(ctx, upstream):
            return tuple(upstream * gradient for gradient in ctx.saved_tensors)

    inputs = make_inputs(device=device)
    loss = Outer.apply(inputs.input, inputs.linear_weight)
    found = torch.autograd.grad(loss, (inputs.input, inputs.linear_weight))
    expected = differentiate(fused, inputs)
    for gradient, name in zip(found, ("input", "linear_weight")):
        assert torch.equal(gradient, expected[name])
