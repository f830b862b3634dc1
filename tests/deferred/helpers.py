"""A model as people write it, and what its losses are compared with: the same model, not deferred.

Shapes: B sequences, T tokens, D features, V classes.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from tests.ops.chunked_loss.helpers import close, roundings_of

B, T, D, V = 3, 7, 16, 63


class GPT(nn.Module):
    """Logits, and a loss if there are targets: nanoGPT's forward."""

    def __init__(self, *, tied=False, bias=False, features=D, classes=V):
        super().__init__()
        self.wte = nn.Embedding(classes, features)
        self.mlp = nn.Linear(features, features)
        self.lm_head = nn.Linear(features, classes, bias=bias)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, tokens, targets=None):
        x = torch.tanh(self.mlp(self.wte(tokens)))
        logits = self.lm_head(x)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def make(*, dtype=torch.float64, device="cpu", **options):
    """(model, tokens, targets), a target of each sequence ignored."""
    model = GPT(**options).to(device, dtype)
    tokens, targets = torch.randint(V, (2, B, T), device=device)
    targets[:, 1] = -1
    return model, tokens, targets


def differentiated(model, value):
    """(value, parameters' gradients, 0 where there is none); of many numbers a fixed mixture."""
    if value.dim():
        generator = torch.Generator().manual_seed(5)
        weights = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        total = (value * weights.to(value.device, value.dtype)).sum()
    else:
        total = value
    trained = [each for each in model.parameters() if each.requires_grad]
    gradients = torch.autograd.grad(total, trained, allow_unused=True)
    return [
        value.detach(),
        *(torch.zeros_like(t) if g is None else g for g, t in zip(gradients, trained)),
    ]


def plain_and_deferred(model, use):
    """What `use` makes of the model's logits, and its gradients: as the model is, and deferred."""
    expected = differentiated(model, use(model))
    with lowtide.defer_logits(model) as deferral:
        found = differentiated(model, use(model))
    return expected, found, deferral


def check(model, use, *, fused=1, dtype=torch.float64):
    """The same numbers, and no logits; with fewer digits, as near to the truth as eager torch."""
    expected, found, deferral = plain_and_deferred(model, use)
    assert deferral.materialized == {}
    assert deferral.fused == fused
    if dtype == torch.float64:
        close(found, expected, roundings=roundings(model, use, expected))
        return
    exact = differentiated(*(lambda each: (each, use(each)))(copy.deepcopy(model).double()))
    for ours, eager, want in zip(found, expected, exact):
        within_eager(ours, eager, want, dtype)


def roundings(model, use, exact):
    """By how many roundings float32, not deferred, is off: what so many operations cost."""
    eager = copy.deepcopy(model).float()
    return roundings_of(differentiated(eager, use(eager)), exact)


def within_eager(ours, eager, exact, dtype, *, size=None):
    """Off by at most twice eager's error and a rounding (of a number as large as `size`)."""
    error, theirs = norm(ours.double() - exact), norm(eager.double() - exact)
    allowed = 2 * theirs + torch.finfo(dtype).eps * (norm(exact) if size is None else size)
    assert error <= allowed, f"error {error:.3e} exceeds its budget {allowed:.3e}"


def norm(tensor):
    return torch.linalg.vector_norm(tensor).item()
