"""Train with a loss no kernel knows, without logits: `python examples/chunked_loss.py`, on a CPU.

A student with a norm, an adapter and a soft cap in its head learns from labels and from a teacher,
each token with a weight of its own. The step is the one that everybody writes:
`loss = loss / n; loss.backward()`. It runs twice, with all logits at once and with those of 128
tokens at a time.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import lowtide

TOKENS, FEATURES, CLASSES, STEPS = 1024, 64, 8192, 8


class Head(nn.Module):
    """Norm, frozen base, trained adapter, soft cap."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.base = nn.Linear(FEATURES, CLASSES, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(FEATURES, 8, bias=False), nn.Linear(8, CLASSES, bias=False)

    def forward(self, hidden):
        hidden = self.norm(hidden)
        return 30 * torch.tanh((self.base(hidden) + self.up(self.down(hidden))) / 30)


def loss_fn(logits, labels, weight, teacher_hidden, teacher):
    """The sum over these tokens, and what to log."""
    loss = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    with torch.no_grad():
        probability = teacher(teacher_hidden).softmax(-1)
    distilled = -(probability * logits.log_softmax(-1)).sum(-1)
    counted = labels != -100
    total = (weight * (loss + 0.5 * distilled) * counted).sum()
    return total, {"right": (logits.argmax(-1) == labels).sum(), "distilled": (distilled * counted).sum()}


def dense(loss_fn, head, hidden, *token_tensors):
    """What chunked_loss computes, with all logits in memory."""
    flat = [each.flatten(0, 1) if isinstance(each, torch.Tensor) else each for each in token_tensors]
    return loss_fn(head(hidden.flatten(0, 1)), *flat)


def train(loss_of):
    torch.manual_seed(0)
    trunk, head = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.GELU()), Head()
    teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
    x, teacher_hidden = torch.randn(2, 1, TOKENS, FEATURES)
    labels = torch.randint(64, (1, TOKENS))
    labels[:, ::7] = -100
    weight = torch.rand(1, TOKENS)
    trained = [each for each in (*trunk.parameters(), *head.parameters()) if each.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    for _ in range(STEPS):
        with lowtide.peak_memory("cpu") as peak:
            loss, aux = loss_of(loss_fn, head, trunk(x), labels, weight, teacher_hidden, teacher)
            loss = loss / labels.ne(-100).sum()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), int(aux["right"]), peak.bytes


if __name__ == "__main__":
    chunked = partial(lowtide.chunked_loss, chunk_size=128, has_aux=True)
    for name, loss_of in (("all at once", dense), ("128 at a time", chunked)):
        loss, right, peak = train(loss_of)
        print(f"{name:>14}: loss {loss:.6f}, {right} tokens right, peak memory {peak / 2**20:.0f} MiB")
