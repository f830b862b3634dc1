"""Backward of calls that went straight: second derivatives, and weights that changed.

Shapes: N tokens.
"""

import pytest
import torch

import lowtide
from tests.ops.linear_cross_entropy.operator.remembered_call.helpers import N, check, loss_of, tensors

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("kind", ["mean", "none", "log-probabilities"])
def test_second_derivatives(device, kind):
    """Backward of a straight call can be differentiated, and a retained graph run again."""
    x, w, target = tensors(device)
    factors = torch.linspace(0.5, 1.5, N, device=device)

    def loss(x, w, target, factors):
        if kind == "mean":
            return loss_of(x, w, target)
        if kind == "none":
            return loss_of(x, w, target, reduction="none") @ factors
        found = lowtide.linear_log_probs(x, w, target, backend="triton")
        return found.log_prob @ factors + found.entropy.sum()

    def true(x, w, target, factors):
        z = x @ w.t()
        if kind == "mean":
            return torch.nn.functional.cross_entropy(z, target)
        log_p = z.log_softmax(1)
        chosen = log_p.gather(1, target[:, None])[:, 0]
        if kind == "none":
            return -chosen @ factors
        return chosen @ factors - (log_p.exp() * log_p).sum()

    for _ in range(2):
        total = loss(x, w, target, factors)
    first = torch.autograd.grad(total, (x, w), retain_graph=True)
    again = torch.autograd.grad(total, (x, w), torch.full_like(total, 2.0), retain_graph=True)
    for one, two in zip(first, again):
        torch.testing.assert_close(2 * one, two)
    (dx,) = torch.autograd.grad(total, x, create_graph=True)
    (second,) = torch.autograd.grad(dx.square().sum(), w)
    xd, wd = (each.detach().cpu().double().requires_grad_() for each in (x, w))
    (dx,) = torch.autograd.grad(true(xd, wd, target.cpu(), factors.cpu().double()), xd, create_graph=True)
    (expected,) = torch.autograd.grad(dx.square().sum(), wd)
    torch.testing.assert_close(second.cpu().double(), expected, rtol=1e-3, atol=1e-5)


def test_backward_sees_weights_that_changed(device):
    x, w, target = tensors(device)
    check(x, w, target)
    loss = loss_of(x, w, target)
    with torch.no_grad():
        w.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
