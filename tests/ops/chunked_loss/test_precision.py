"""Half precision, autocast, loss scaling: no less exact than dense."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn

from tests.ops.chunked_loss.helpers import (
    MODES,
    B,
    D,
    T,
    V,
    cast,
    chunked_loss,
    close,
    cross_entropy,
    dense,
    gradients,
    leaves,
    make,
    per_row,
    relative,
)


class Widened(nn.Module):
    def forward(self, logits):
        return logits.double()


def check_within_dense(gradients_of, head, hidden, rounding=0.0):
    """The errors of gradients_of(loss_of, head, hidden): ours, at most twice the dense ones."""
    truth, eager = (gradients_of(dense, *each) for each in (cast(head, hidden), (head, hidden)))
    for found, plain, want in zip(gradients_of(chunked_loss, head, hidden), eager, truth):
        assert relative(found, want) <= 2 * relative(plain, want) + rounding


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["linear", "norm", "adapted"])
def test_accuracy_within_dense(device, kind, dtype, mode):
    head, hidden, labels = make(kind, device=device, dtype=dtype, tokens=150)
    truth = gradients(dense, *cast(head, hidden), labels)
    eager = gradients(dense, head, hidden, labels)
    ours = gradients(chunked_loss, head, hidden, labels, chunk_size=32, mode=mode)
    assert all(found.dtype == dtype for found in ours)
    for part in (slice(0, 1), slice(1, None)):  # one number may be right by luck: the head's gradients as one
        found, plain, want = (
            torch.cat([each.flatten() for each in result[part]]) for result in (ours, eager, truth)
        )
        assert relative(found, want) <= 2 * relative(plain, want)


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_chunks_summed_in_float32(device, mode):
    """256 chunks: a sum in bfloat16 would be off by some per cent."""
    head = nn.Linear(D, V, bias=False).to(device, torch.bfloat16)
    hidden = torch.randn(1, 1024, D, device=device).to(torch.bfloat16).requires_grad_()
    labels = torch.randint(V, (1, 1024), device=device)

    def gradients_of(loss_of, own, h):
        return gradients(loss_of, own, h, labels, chunk_size=4, mode=mode)

    check_within_dense(gradients_of, head, hidden)


def test_half_precision_loss_summed_in_float32(device):
    head, hidden, labels = make("linear", device=device, dtype=torch.bfloat16)

    def rounded(logits, labels):
        return cross_entropy(logits, labels).bfloat16()

    assert chunked_loss(rounded, head, hidden, labels, chunk_size=2).dtype == torch.float32


@pytest.mark.parametrize("factor", [1e-6, 1e-10])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_float16_gradients_no_underflow(device, mode, autocast, factor):
    """A loss divided by many tokens and scaled by the scaler: at scale 1 most or all would be 0."""
    dtype = torch.float32 if autocast else torch.float16
    head, hidden, labels = make("linear", device=device, dtype=dtype, ignored=0)
    labels.view(-1)[:5] = -100  # the first chunk says nothing about the size of the others'
    with torch.no_grad():
        hidden *= 1e-3
        head.weight *= 0.1

    def loss_fn(logits, labels):
        return cross_entropy(logits, labels) * factor

    own, h = cast(head, hidden)
    truth = torch.autograd.grad(dense(loss_fn, own, h, labels), leaves(own, h))
    scale = 16 / factor
    results = []
    for loss_of in (chunked_loss, dense):
        with torch.autocast(device, torch.float16, enabled=autocast):
            loss = loss_of(loss_fn, head, hidden, labels, chunk_size=5, mode=mode)
        results.append(torch.autograd.grad(loss * scale, leaves(head, hidden)))
    for ours, eager, want in zip(*results, truth):
        rounding = torch.finfo(torch.float16).eps
        assert relative(ours.double() / scale, want) <= 2 * relative(eager.double() / scale, want) + rounding


@dataclass
class Output:
    """What pytree does not know."""

    logits: torch.Tensor


def test_float16_gradients_no_underflow_in_object(device):
    head, hidden, labels = make("linear", device=device, dtype=torch.float16, ignored=0)

    def wrapped(module, hidden):
        return Output(module(hidden))

    def loss_fn(output, labels):
        return cross_entropy(output.logits, labels) * 1e-6

    def gradients_of(loss_of, own, h):
        loss, scale = loss_of(loss_fn, partial(wrapped, own), h, labels, chunk_size=5), 2.0**24
        return [each.double() / scale for each in torch.autograd.grad(loss * scale, leaves(own, h))]

    check_within_dense(gradients_of, head, hidden)


def weighted(logits, labels, weight):
    return (per_row(logits, labels) * weight).sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("largest", [1e4, 1e7])
def test_float16_gradients_no_overflow(device, largest, mode):
    """Rows of very different weights, the largest beyond float16 until the loss is divided."""
    head, hidden, labels = make("linear", device=device, dtype=torch.float16, ignored=0)
    sizes = torch.logspace(-8, 0, B * T, device=device).view(B, T) * largest

    def gradients_of(loss_of, own, h):
        loss = loss_of(weighted, own, h, labels, sizes, chunk_size=5, mode=mode)
        return torch.autograd.grad(loss / (largest / 64), leaves(own, h))

    check_within_dense(gradients_of, head, hidden, torch.finfo(torch.float16).eps)


@pytest.mark.parametrize("kind", ["linear", "norm"])
@pytest.mark.parametrize("factor", [1e-2, 1e-3, 6e-5])
def test_float16_gradients_behind_small_factor(device, kind, factor):
    """Gradients within the loss are far larger than the output's; the factor's is their sum."""
    head, hidden, _ = make(kind, device=device, dtype=torch.float16, tokens=40)
    with torch.no_grad():
        head.scale.mul_(4) if kind == "norm" else head.weight.mul_(8)
        labels = head(hidden).argmin(-1)

    def loss_fn(logits, labels, factor):
        return cross_entropy(logits * factor, labels)

    def gradients_of(loss_of, own, h):
        f = torch.tensor(factor, device=device).half().to(h.dtype).requires_grad_()
        loss = loss_of(loss_fn, own, h, labels, f, mode="gradient_in_forward")
        return torch.autograd.grad(loss / len(labels.view(-1)), [f, *leaves(own, h)])

    check_within_dense(gradients_of, head, hidden, torch.finfo(torch.float16).eps)


def test_float16_autocast_of_float64(device):
    """Autocast leaves float64 as it is, and so does the power of two that float16 asks for."""
    head, hidden, labels = make(device=device)
    expected = gradients(dense, head, hidden, labels)
    with torch.autocast(device, torch.float16):
        found = gradients(chunked_loss, head, hidden, labels, chunk_size=5)
    close(found, expected)


def test_float16_head_of_float64_logits(device):
    head, hidden, labels = make("linear", device=device, dtype=torch.float16)

    def gradients_of(loss_of, own, h):
        wide = nn.Sequential(own, Widened())
        return gradients(loss_of, wide, h, labels, chunk_size=5)

    check_within_dense(gradients_of, head, hidden, torch.finfo(torch.float16).eps)


def test_float16_sums_over_many_rows(device):
    """The sum of 16,384 gradients near 2^3 is more than float16 holds; their mean is not."""
    head, hidden, _ = make("norm", device=device, dtype=torch.float16, tokens=8192)
    labels = head(hidden).argmin(-1)
    rows = labels.numel()

    def gradients_of(loss_of, own, h):
        weight = torch.full(labels.shape, 1 / rows, dtype=h.dtype, device=device, requires_grad=True)
        loss = loss_of(weighted, own, h, labels, weight, chunk_size=rows, mode="gradient_in_forward")
        return torch.autograd.grad(loss, [weight, *leaves(own, h)])

    check_within_dense(gradients_of, head, hidden, torch.finfo(torch.float16).eps)


class ScaledInPlace(torch.autograd.Function):
    """Save a sum of squares' gradient; multiply it in place in backward, as fused losses do."""

    @staticmethod
    def forward(ctx, x):
        ctx.gradient = 2 * x.float()
        return x.float().square().sum()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.gradient.mul_(upstream).half()


def test_float16_loss_scaled_in_place(device):
    """The pass that measures a chunk's gradients leaves them to the pass that forms them."""
    head, hidden, labels = make("linear", device=device, dtype=torch.float16)

    def squares(logits, labels):
        return ScaledInPlace.apply(logits * 2.0**-6)

    def exact(logits, labels):
        return (logits * 2.0**-6).square().sum()

    found = torch.autograd.grad(
        chunked_loss(squares, head, hidden, labels, chunk_size=6), leaves(head, hidden)
    )
    own, h = cast(head, hidden)
    truth = torch.autograd.grad(dense(exact, own, h, labels), leaves(own, h))
    for ours, want in zip(found, truth):
        assert relative(ours, want) <= 4 * torch.finfo(torch.float16).eps


@pytest.mark.parametrize("mode", MODES)
def test_step_with_grad_scaler(device, mode):
    head, hidden, labels = make("linear", device=device, dtype=torch.float32)
    truth = gradients(dense, *cast(head, hidden), labels)
    results = []
    for loss_of in (chunked_loss, dense):
        optimizer = torch.optim.SGD([*head.parameters(), hidden], lr=0)
        scaler = torch.amp.GradScaler(device, init_scale=2.0**16)
        with torch.autocast(device, torch.float16):
            loss = loss_of(cross_entropy, head, hidden, labels, chunk_size=5, mode=mode) / 18
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        results.append([leaf.grad for leaf in leaves(head, hidden)])
        optimizer.zero_grad()
    for ours, eager, want in zip(*results, truth):
        rounding = torch.finfo(torch.float16).eps
        assert relative(ours, want) <= 2 * relative(eager, want) + rounding


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["outside", "inside", "switched off inside"])
def test_autocast(device, where, mode):
    """Whatever surrounds the backward pass; what is switched off inside stays exact."""
    head, hidden, labels = make("two layers", device=device, dtype=torch.float32)

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = head

        def forward(self, hidden):
            with torch.autocast(device, torch.bfloat16, enabled=where == "inside"):
                return self.head(hidden.float())

    outside, module = where != "inside", head if where == "outside" else Cast()
    dtypes = []

    def loss_fn(logits, labels):
        dtypes.append(logits.dtype)
        return cross_entropy(logits, labels)

    def run(loss_of, backward_inside):
        with torch.autocast(device, torch.bfloat16, enabled=outside):
            loss = loss_of(loss_fn, module, hidden, labels, chunk_size=5, mode=mode)
            if backward_inside:
                return torch.autograd.grad(loss / 18, leaves(head, hidden))
        return torch.autograd.grad(loss / 18, leaves(head, hidden))

    want = run(dense, False)
    truth = gradients(dense, *cast(head, hidden), labels)
    for backward_inside in (False, True):
        ours = run(chunked_loss, backward_inside)
        if where == "switched off inside":
            close(ours, want, torch.float32)
        for found, eager, exact in zip(ours, want, truth):
            assert found.dtype == torch.float32
            rounding = torch.finfo(torch.bfloat16).eps
            assert relative(found, exact) <= 2 * relative(eager, exact) + rounding
    assert set(dtypes) == {torch.float32 if where == "switched off inside" else torch.bfloat16}
