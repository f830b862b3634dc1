"""Functions of rows in batches of autograd."""

import pytest
import torch

from lowtide.memory import peak_memory
from tests.core.rowwise.functions import by_rows, dense, made


def test_batched_gradients_differentiated():
    """Gradients of is_grads_batched=True with create_graph=True have an exact derivative."""
    tensors = made()
    upstream = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (by_rows, dense):
        gradients = torch.autograd.grad(
            function(*tensors), tensors, upstream, is_grads_batched=True, create_graph=True
        )
        penalty = sum(gradient.square().sum() for gradient in gradients)
        found.append((*gradients, *torch.autograd.grad(penalty, (*tensors, upstream))))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("strategy", ["forward-mode", "reverse-mode"])
def test_batches_of_batches(strategy, size):
    """A Jacobian in one pass, of a function that batches gradients itself."""
    x, factor, w = made()
    upstream = torch.randn(size, 7, dtype=torch.float64)
    found = []
    for function in (by_rows, dense):

        def gradients(x, function=function):
            x = x if x.requires_grad else x.requires_grad_()
            result = function(x, factor, w)
            return torch.autograd.grad(result, x, upstream, is_grads_batched=True, create_graph=True)[0]

        found.append(
            torch.autograd.functional.jacobian(gradients, x.detach(), vectorize=True, strategy=strategy)
        )
    assert found[1].abs().max() > 0.01
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


def test_batch_of_nothing():
    """A Jacobian of no rows has no column to compute."""
    _, _, w = made()

    def function(x):
        return by_rows(x, x.new_ones(len(x)), w)

    found = torch.autograd.functional.jacobian(
        function, torch.randn(0, 3, dtype=torch.float64), vectorize=True, strategy="forward-mode"
    )
    assert found.shape == (0, 0, 3)


def test_memory_of_a_batch():
    """A batch of 16 upstream gradients holds the logits of one chunk for one of them."""
    N, V, chunk = 256, 2048, 16
    tensors = made(N, 2, V, torch.float32)
    upstream = torch.randn(16, N)
    loss = by_rows(*tensors, chunk=chunk)
    with peak_memory("cpu") as peak:
        torch.autograd.grad(loss, tensors, upstream, is_grads_batched=True)
    results = 2 * 16 * sum(each.numel() * 4 for each in tensors)
    assert peak.bytes <= results + 8 * chunk * V * 4
    assert peak.largest <= 16 * V * 2 * 4
