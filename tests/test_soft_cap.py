"""Where a soft cap holds all logits (|u| / cap from 4 to 10), the gradients keep float32's digits.

A product u of one rounding makes the slope 4 exp(-2 |u| / cap) off by 2 |u| / cap units of the last
place, 20 at most; twelve more are for all else. With 1 - tanh^2 it is off by hundreds, as in eager
torch.

Shapes: N tokens, V classes; one feature, so that no product is a sum.
"""

import pytest
import torch

import lowtide
from tests.support.loss import norm, skip_unless_runnable

ALLOWED = (20 + 12) * torch.finfo(torch.float32).eps
CAP = 2.0
BACKENDS = ["torch", "triton"]


def saturated(device, *, N=9, V=40):
    """[N, 1] and [V, 1], whose products are from 4 to 10 times the cap, of either sign."""
    x_N1 = torch.empty(N, 1).uniform_(2.0, 2.5)
    w_V1 = torch.empty(V, 1).uniform_(2.0, 4.0) * torch.randn(V, 1).sign() * CAP
    return (each.to(device).requires_grad_() for each in (x_N1, w_V1))


def check(loss_of, *leaves):
    """Float32 gradients of `loss_of(*leaves)` beside those of float64 by torch's own operators."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(loss_of(*wide), wide)
    for gradient, want in zip(torch.autograd.grad(loss_of(*leaves), leaves), exact):
        error = norm(gradient.double() - want) / norm(want)
        assert error <= ALLOWED, f"{error:.1e}"


def in_float64_by_torch(function, **options):
    """`function` with these options, but the definition for float64."""

    def loss(*leaves):
        backend = "reference" if leaves[0].dtype == torch.float64 else options["backend"]
        return function(*leaves, **{**options, "backend": backend})

    return loss


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss(device, reduction, backend):
    skip_unless_runnable(backend, device)
    x, w = saturated(device)
    target = torch.randint(len(w), (len(x),), device=device)
    call = in_float64_by_torch(
        lowtide.linear_cross_entropy, target=target, softcap=CAP, reduction=reduction, backend=backend
    )
    check(lambda x, w: call(x, w).sum(), x, w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_log_probs(device, backend):
    skip_unless_runnable(backend, device)
    x, w = saturated(device)
    target = torch.randint(len(w), (len(x),), device=device)
    call = in_float64_by_torch(lowtide.linear_log_probs, target=target, softcap=CAP, backend=backend)
    check(lambda x, w: call(x, w).log_prob.sum(), x, w)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jensen_shannon"])
def test_distillation(device, divergence):
    x, w = saturated(device)
    teacher = torch.randn(len(x), 3, device=device), torch.randn(len(w), 3, device=device)
    function = getattr(lowtide.distillation, divergence)

    def loss(x, w):
        return function(x, w, *(each.to(x.dtype) for each in teacher), student_softcap=CAP, reduction="sum")

    check(loss, x, w)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns where exp2 gets -inf in the interpreter
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention(device, backend):
    """Values of alternating sign: the gradients of the scores are of the size of their weights."""
    skip_unless_runnable(backend, device)
    q, k = (each.detach().view(1, -1, 1, 1).requires_grad_() for each in saturated(device))
    v = torch.ones_like(k).detach()
    v[:, ::2] = -1.0

    def out(query, key):
        by = "reference" if query.dtype == torch.float64 else backend
        value = v.to(query.dtype)
        options = {"scale": 1.0, "softcap": CAP, "backend": by}
        return lowtide.memory_efficient_attention(query, key, value, **options).square().sum()

    check(out, q, k)


def test_infinities_and_nan(device):
    """As with 1 - tanh^2: a slope of 0, and NaN."""
    from lowtide.core.elementwise import slope_of_tanh

    x = torch.tensor([torch.inf, -torch.inf, 1e30, torch.nan, 0.0], device=device)
    assert torch.equal(slope_of_tanh(x).nan_to_num(9.0).cpu(), torch.tensor([0.0, 0.0, 0.0, 9.0, 1.0]))
