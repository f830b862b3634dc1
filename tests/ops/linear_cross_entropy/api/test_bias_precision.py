"""A float32 bias beside half-precision operands is used as it is: sums are in float32 anyway.

Shapes: N tokens, D features, V classes.
"""

import pytest
import torch
import torch.nn.functional as F

import lowtide
from tests.deferred.helpers import norm, within_eager

N, D, V = 24, 256, 4100  # with so many weights a CPU uses its own bfloat16 products


def losses(backend, reduction):
    def loss(x, w, b, target):
        if reduction == "log-probabilities":
            found = lowtide.linear_log_probs(x, w, target, linear_bias=b, backend=backend)
            return found.log_prob - found.entropy
        return lowtide.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction, backend=backend)

    return loss


def of_logits(z, target, reduction):
    if reduction == "log-probabilities":
        log_p = z.log_softmax(-1)
        return log_p.gather(-1, target[:, None])[:, 0] + (log_p.exp() * log_p).sum(-1)
    return F.cross_entropy(z, target, reduction=reduction)


def dense(reduction):
    def loss(x, w, b, target):
        wide = torch.promote_types(x.dtype, torch.float32)
        return of_logits(F.linear(x, w).to(wide) + b, target, reduction)

    return loss


def differentiated(loss, leaves, target):
    leaves = [each.detach().requires_grad_() for each in leaves]
    found = loss(*leaves, target)
    weights = torch.linspace(0.5, 1, found.numel(), device=found.device, dtype=found.dtype).view(found.shape)
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), leaves)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none", "log-probabilities"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_bias_of_higher_precision(device, backend, dtype, reduction):
    torch.manual_seed(0)
    x = torch.randn(N, D, device=device).to(dtype)
    w = (torch.randn(V, D, device=device) / 16).to(dtype)
    b = torch.linspace(-300, 301.3, V, device=device)
    target = torch.randint(V - 8, V, (N,), device=device)
    found = differentiated(losses(backend, reduction), (x, w, b), target)
    eager = differentiated(dense(reduction), (x, w, b), target)
    exact = differentiated(dense(reduction), (x.double(), w.double(), b.double()), target)
    assert [each.dtype for each in found[1:]] == [dtype, dtype, torch.float32]
    for ours, theirs, want in zip(found[:-1], eager, exact):
        within_eager(ours, theirs, want, ours.dtype)
    # G_NV is rounded once to the operands' dtype, which eager's is not: half a unit of its norm.
    logits = F.linear(x.double(), w.double(), b.double())
    *_, g_NV = differentiated(lambda z, target: of_logits(z, target, reduction), [logits], target)
    within_eager(found[-1], eager[-1], exact[-1], dtype, size=norm(g_NV) / 2)


def test_bias_of_higher_precision_positions(device):
    torch.manual_seed(0)
    x = torch.randn(9, 16, device=device).bfloat16()
    w = torch.randn(33, 2, 16, device=device).bfloat16()
    b = 100 * torch.randn(33, 2, device=device)
    target = torch.randint(33, (9, 2), device=device)

    def of_positions(x, w, b, target):
        return lowtide.linear_cross_entropy(x, w, target, linear_bias=b)

    def dense_positions(x, w, b, target):
        z = torch.einsum("nd,vpd->nvp", x, w).to(torch.promote_types(x.dtype, torch.float32)) + b
        return F.cross_entropy(z, target)

    found = differentiated(of_positions, (x, w, b), target)
    eager = differentiated(dense_positions, (x, w, b), target)
    exact = differentiated(dense_positions, (x.double(), w.double(), b.double()), target)
    for ours, theirs, want in zip(found, eager, exact):
        within_eager(ours, theirs, want, ours.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_bias_of_other_dtypes_refused(dtype):
    x, w = torch.randn(3, 4).bfloat16(), torch.randn(5, 4).bfloat16()
    with pytest.raises(TypeError, match="linear_bias must have the dtype of input"):
        lowtide.linear_cross_entropy(x, w, torch.arange(3), linear_bias=torch.zeros(5, dtype=dtype))
