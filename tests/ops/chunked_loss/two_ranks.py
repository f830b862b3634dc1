"""What test_distributed.py runs as two processes: each scenario is trained by two ranks, and
densely by each alone on all of the data, in float64. The result: the collectives of the head in one
step, and the rows of its chunks."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lowtide.ops.chunked_loss import chunked_loss
from tests.ops.chunked_loss.helpers import close, cross_entropy, dense, per_row
from tests.support.collectives import Collectives
from tests.support.ranks import RANKS, generator, gradients, mesh_of

D, V, ROWS = 6, 22, (11, 4)  # rows of each rank: three chunks and one
CHUNK = 4
WORKSPACE = 2000  # bytes: three rows
HEAD_SIZE = V * D + V + D
SIZES: list[int] = []


def counted(logits, labels, **options):
    SIZES.append(len(logits))
    return cross_entropy(logits, labels, **options)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain, self.linear = nn.Parameter(torch.rand(D)), nn.Linear(D, V)

    def forward(self, hidden):
        return self.linear(hidden * self.gain)


class Model(nn.Module):
    """The loss is computed in `forward`, by whatever `loss_of` says."""

    def __init__(self, loss_of, *, per_row=False):
        super().__init__()
        self.trunk, self.head = nn.Linear(D, D), Head()
        self.loss_of, self.loss_fn = loss_of, per_row_loss if per_row else counted

    def forward(self, x, labels):
        return self.loss_of(self.loss_fn, self.head, self.trunk(x).tanh(), labels).sum()


class Hidden(Model):
    """The loss is computed outside, from what `forward` returns."""

    def forward(self, x, labels=None):
        return self.trunk(x).tanh()


class LossModule(nn.Module):
    """A unit of its own around the head."""

    def __init__(self, head, loss_of):
        super().__init__()
        self.head, self.loss_of = head, loss_of

    def forward(self, hidden, labels):
        return self.loss_of(cross_entropy, self.head, hidden, labels)


class Wrapped(Model):
    def __init__(self, loss_of):
        super().__init__(loss_of)
        self.loss = LossModule(self.head, loss_of)
        del self.head

    def forward(self, x, labels):
        return self.loss(self.trunk(x).tanh(), labels)


def per_row_loss(logits, labels):
    return per_row(logits, labels)


def build(kind, loss_of):
    torch.manual_seed(0)
    if kind.endswith("wrapped"):
        return Wrapped(loss_of)
    return (Hidden if "outside" in kind else Model)(loss_of, per_row="per row" in kind)


def parallel(kind, model):
    if kind.startswith("ddp"):
        return DistributedDataParallel(model)
    inner = model.loss if kind.endswith("wrapped") else model.head
    mesh = mesh_of(RANKS)
    fully_shard(model.trunk, mesh=mesh)
    if "root" not in kind:
        said = {} if "default" in kind else {"reshard_after_forward": "reshard" in kind}
        fully_shard(inner, mesh=mesh, **said)
    if kind.endswith("once"):
        inner.set_unshard_in_backward(False)
    return fully_shard(model, mesh=mesh)


def step(kind, model, x, labels, loss_of):
    owner = model.module if isinstance(model, DistributedDataParallel) else model
    outside = "outside" in kind
    loss = loss_of(owner.loss_fn, owner.head, model(x), labels) if outside else model(x, labels)
    loss = loss / sum(ROWS) * len(ROWS)  # ranks average their gradients
    loss *= 0.5
    loss.backward()


def run(kind, rank):
    torch.set_default_dtype(torch.float64)
    mode = "recompute" if "recompute" in kind or "per row" in kind else "gradient_in_forward"
    size = {"workspace": WORKSPACE} if "workspace" in kind else {"chunk_size": CHUNK}
    loss_of = partial(chunked_loss, mode=mode, **size)
    seeded = generator(1)
    x = torch.randn(sum(ROWS), D, generator=seeded)
    labels = torch.randint(V, (sum(ROWS),), generator=seeded)
    model = parallel(kind, build(kind, loss_of))
    collectives = Collectives(HEAD_SIZE)
    for _ in range(2):  # gradients accumulate over both, collectives are those of the second
        collectives.counts = dict.fromkeys(collectives.counts, 0)
        SIZES.clear()
        with collectives:
            step(kind, model, x.split(ROWS)[rank], labels.split(ROWS)[rank], loss_of)
    sizes = SIZES.copy()
    whole = build(kind, dense)
    for _ in range(2):
        step(kind, whole, x, labels, dense)
    expected = {name: gradient / len(ROWS) for name, gradient in gradients(whole).items()}
    found = {name.removeprefix("module."): gradient for name, gradient in gradients(model).items()}
    assert found.keys() == expected.keys()
    close([found[name] for name in expected], list(expected.values()))
    return {"sizes": sizes, **collectives.counts}
