"""Calls of the loss, made twice, and their truth.

Shapes: N tokens, D features, V classes.
"""

import torch

import lowtide

N, D, V = 12, 16, 40


def tensors(device, *, N=N, D=D, V=V, dtype=torch.float32):
    generator = torch.Generator().manual_seed(N * D + V)
    x = torch.randn(N, D, generator=generator).to(device, dtype)
    w = torch.randn(V, D, generator=generator).to(device, dtype)
    target = torch.randint(V, (N,), generator=generator).to(device)
    return x.requires_grad_(), w.requires_grad_(), target


def loss_of(x, w, target, **options):
    return lowtide.linear_cross_entropy(x, w, target, backend="triton", **options)


def exact(
    x, w, target, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0
):
    """The loss and its gradients in float64."""
    x, w = (each.detach().cpu().double().requires_grad_(each.requires_grad) for each in (x, w))
    z, target = x.flatten(0, -2) @ w.t(), target.cpu().flatten().long()
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    keywords = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    loss = torch.nn.functional.cross_entropy(z, target, reduction="sum", **keywords)
    loss = loss + z_loss * (z.logsumexp(1)[target != ignore_index] ** 2).sum()
    loss = loss if reduction == "sum" else loss / (target != ignore_index).sum()
    wanted = [each for each in (x, w) if each.requires_grad]
    return loss.detach(), torch.autograd.grad(loss, wanted)


def check(x, w, target, **options):
    """Compare a call, and a second one that is alike, with float64."""
    loss, gradients = exact(x, w, target, **options)
    wanted = [each for each in (x, w) if each.requires_grad]
    for _ in range(2):
        found = loss_of(x, w, target, **options)
        torch.testing.assert_close(found.detach().cpu().double(), loss, rtol=1e-5, atol=1e-6)
        for actual, expected in zip(torch.autograd.grad(found, wanted), gradients):
            actual = actual.cpu().double()
            half = actual.dtype != wanted[0].dtype and wanted[0].dtype == torch.bfloat16
            tolerance = {"rtol": 0.05, "atol": 0.02} if half else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(actual, expected, **tolerance)
