"""A number on a module that changes is found; what a module counts and logs is accepted."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.constants import check, inputs, scaled
from tests.ops.chunked_loss.helpers import D, V


class Head(nn.Module):
    cap = 2.0

    def __init__(self):
        super().__init__()
        self.linear, self.cfg = nn.Linear(D, V, dtype=torch.float64), {"cap": 2.0}
        self.layers = nn.Sequential(nn.Identity(), nn.Dropout(0.5), nn.Softplus(beta=2.0))
        self.own, self.calls = 2.0, 0

    def forward(self, h):
        return self.logits(h) * self.cap * self.cfg["cap"]

    def logits(self, h):
        self.calls += 1
        return self.layers(self.linear(h)) * self.own


@pytest.mark.parametrize("name", ["own", "cap", "cfg", "p", "beta"])
@pytest.mark.parametrize("bound", [False, True])
def test_constant_number_on_module(name, bound):
    head = Head()
    change = {
        "own": lambda: setattr(head, "own", -3.0),
        "cap": lambda: setattr(head, "cap", -3.0),
        "cfg": lambda: head.cfg.update(cap=-3.0),
        "p": lambda: setattr(head.layers[1], "p", 0.1),
        "beta": lambda: setattr(head.layers[2], "beta", 0.5),
    }[name]
    check(functools.partial(scaled, factor=1.0), change, head.forward if bound else head, names="head")


class Busy(nn.Module):
    """It counts, logs and caches as it runs, and belongs to a trainer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, V, dtype=torch.float64)
        self.calls, self.log, self.cache, self.step = 0, [], {}, 0
        self.trainer = SimpleNamespace(step=0, head=self, seen=torch.zeros(()))

    def forward(self, h):
        self.calls += 1
        self.log.append(self.calls)
        self.cache.setdefault(len(h), torch.ones(len(h), 1, dtype=torch.float64))
        self.trainer.seen.add_(1)
        return self.linear(h) * self.cache[len(h)]


def test_constant_changed_by_function_accepted():
    """Counters, logs, caches: also where another call comes in between, as with two losses of a
    step; and what no code of theirs names."""
    head, hidden, labels = Busy(), *inputs()[1:]
    total = torch.zeros((), dtype=torch.float64)

    def loss_fn(a, y):
        loss = scaled(a, y, 1.0)
        total.add_(loss.detach())
        return loss

    losses = [
        chunked_loss(loss_fn, head, hidden[:rows], labels[:rows], chunk_size=7, mode="recompute")
        for rows in (29, 17)
    ]
    head.trainer.step += 1
    head.step += 1
    (found,) = torch.autograd.grad(sum(losses), hidden)
    expected = sum(scaled(head.linear(hidden[:rows]), labels[:rows], 1.0) for rows in (29, 17))
    torch.testing.assert_close(found, torch.autograd.grad(expected, hidden)[0])
