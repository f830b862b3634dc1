"""Models and heads that lowtide.shard_head divides over two ranks, and their data.

Shapes: D features, V classes.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowtide
from tests.support.ranks import generator

D, V, ROWS = 8, 37, (11, 4)  # rows of each rank
CLASS_WEIGHT = torch.linspace(0.5, 2, V)


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.body = nn.Linear(4, D)
        self.criterion = lowtide.LinearCrossEntropyLoss(D, V, bias="bias" in kind)
        self.scale = nn.Parameter(torch.tensor([1.3])) if "scale" in kind else None

    @property
    def head(self):
        return self.criterion.linear

    def forward(self, x):
        return self.body(x).tanh()


def data(kind, dtype):
    seeded = generator(1)
    x = torch.randn(sum(ROWS), 4, generator=seeded, dtype=torch.float64).to(dtype)
    y = torch.randint(V, (sum(ROWS),), generator=seeded)
    weights = torch.rand(sum(ROWS), generator=seeded, dtype=torch.float64).to(dtype)
    y[2] = -100
    if "ignored" in kind:
        y[ROWS[0] :] = -100
    return x, y, weights


def build(kind, dtype):
    torch.manual_seed(0)
    model = Model(kind).to(dtype)
    if "frozen" in kind:
        model.head.requires_grad_(False)
    return model


def sharded(kind, model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=None)
    given = {"mesh": mesh} | ({"mp_policy": policy} if "mixed" in kind else {})
    own = set() if "fsdp" in kind else lowtide.shard_head(model, mesh, head=model.head)
    if "fsdp" in kind:
        fully_shard(model.head, **given)
    return fully_shard(model, ignored_params=own, **given)


def divided_head(kind, rank, mesh):
    """(head, the same head whole, hidden states and targets of this rank, those of all ranks)."""
    head = build(kind, torch.float64).head
    alone = copy.deepcopy(head)
    lowtide.shard_head(head, mesh, head=head)
    x, y, _ = data(kind, torch.float64)
    hidden = F.linear(x, torch.linspace(-1, 1, 4 * D, dtype=x.dtype).view(D, 4))
    return head, alone, (hidden.split(ROWS)[rank], y.split(ROWS)[rank]), (hidden, y)


def refused(message, function, *arguments, **options):
    """Raised on every rank, and no rank waits for another."""
    with pytest.raises(ValueError, match=re.escape(message)):
        function(*arguments, **options)
