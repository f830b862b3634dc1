"""Hidden states and token tensors may be complex: frames of a spectrum, Fourier features."""

from functools import partial

import pytest
import torch
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import MODES

N, D, V = 11, 5, 4


def distance(predicted, spectrum):
    return (spectrum.abs() - predicted).square().sum() + (spectrum * spectrum).real.sum()


class Magnitudes(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden.real) * hidden.imag.sum(-1, keepdim=True)


def make(dtype=torch.complex128):
    torch.manual_seed(0)
    hidden = torch.randn(N, D, dtype=dtype, requires_grad=True)
    spectrum = torch.randn(N, V, dtype=dtype, requires_grad=True)
    return Magnitudes(D, V, dtype=dtype.to_real()), hidden, spectrum


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", [False, True])
def test_gradients(mode, frozen):
    head, hidden, spectrum = make()
    head.requires_grad_(not frozen)
    leaves = [hidden, spectrum, *(() if frozen else head.parameters())]
    expected = torch.autograd.grad(3 * distance(head(hidden), spectrum), leaves)
    loss = 3 * chunked_loss(distance, head, hidden, spectrum, chunk_size=4, mode=mode)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected)


@pytest.mark.parametrize("mode", MODES)
def test_only_hidden_is_complex(mode):
    hidden = make()[1]
    (expected,) = torch.autograd.grad(hidden.abs().sum(), hidden)
    loss = chunked_loss(torch.sum, torch.abs, hidden, chunk_size=4, mode=mode)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], expected)


@pytest.mark.parametrize("mode", MODES)
def test_second_derivatives(mode):
    head, hidden, spectrum = make()
    leaves = [hidden, spectrum, *head.parameters()]

    def second(loss):
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        return torch.autograd.grad(sum(each.abs().square().sum() for each in first), leaves)

    expected = second(distance(head(hidden), spectrum))
    got = second(chunked_loss(distance, head, hidden, spectrum, chunk_size=4, mode=mode))
    torch.testing.assert_close(got, expected)


def test_transform():
    head, hidden, spectrum = make()
    head.requires_grad_(False)
    chunked = partial(chunked_loss, distance, head, chunk_size=4)
    got = torch.func.grad(chunked, (0, 1))(hidden.detach(), spectrum.detach())
    expected = torch.autograd.grad(distance(head(hidden), spectrum), [hidden, spectrum])
    torch.testing.assert_close(got, expected)


def test_float16_beside_complex():
    _, hidden, spectrum = make(torch.complex64)
    head = nn.Linear(D, V).half()

    def real(head, hidden):
        return torch.view_as_complex(torch.stack([head(hidden.real.half()).float(), hidden.imag[:, :V]], -1))

    def loss_fn(predicted, spectrum):
        return (predicted - spectrum).abs().square().sum()

    leaves = [hidden, spectrum, head.weight]
    expected = torch.autograd.grad(loss_fn(real(head, hidden), spectrum), leaves)
    loss = chunked_loss(loss_fn, partial(real, head), hidden, spectrum, chunk_size=4)
    torch.testing.assert_close(torch.autograd.grad(loss, leaves), expected, rtol=2e-3, atol=2e-3)


def test_forward_mode():
    head, hidden, spectrum = make()
    head.requires_grad_(False)
    chunked = partial(chunked_loss, distance, head, chunk_size=4)
    primals = hidden.detach(), spectrum.detach()
    tangents = tuple(torch.randn_like(each) for each in primals)
    _, expected = torch.func.jvp(lambda hidden, spectrum: distance(head(hidden), spectrum), primals, tangents)
    torch.testing.assert_close(torch.func.jvp(chunked, primals, tangents)[1], expected)
