"""Computes, as processes of test_mean_over_ranks.py, one optimizer step's gradients, averaged over
the ranks by DDP or FSDP2, beside those of one process that has all of the data. Everything is
float64.

A scenario is (wrapper, data-parallel ranks, targets, micro-batches, loss). The ranks that are left
are sequence parallel: each has a part of the tokens of every sequence of its data-parallel rank.

Shapes: A micro-batches, P data-parallel ranks, B sequences of each, T tokens, D features, V
classes.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowtide
from tests.support.ranks import mesh_of, whole

B, T, D, V = 2, 8, 6, 11
CLASS_WEIGHT = torch.linspace(0.5, 2, V, dtype=torch.float64)
SMOOTHING = {"weight": CLASS_WEIGHT, "label_smoothing": 0.1}


def cross_entropy(logits, labels):
    return F.cross_entropy(logits, labels, reduction="sum")


class Model(nn.Module):
    """The sum of a loss over the tokens, over a normaliser."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, kind, x, y, normalizer):
        hidden, head, w, b = self.body(x).tanh(), self.head, self.head.weight, self.head.bias
        advantage = x[..., 0]
        match kind:
            case "loss":
                return lowtide.linear_cross_entropy(hidden, w, y, linear_bias=b, normalizer=normalizer)
            case "weighted":
                return lowtide.linear_cross_entropy(
                    hidden, w, y, linear_bias=b, normalizer=normalizer, **SMOOTHING
                )
            case "chunked":
                return lowtide.chunked_loss(
                    cross_entropy, head, hidden, y, normalizer=normalizer, chunk_size=5
                )
            case "log-probs":
                out = lowtide.linear_log_probs(hidden, w, y, linear_bias=b)
                return -(out.log_prob * advantage).sum() / normalizer
            case "truth log-probs":
                log_prob = -F.cross_entropy(head(hidden).movedim(-1, 1), y, reduction="none")
                return -(log_prob * advantage).sum() / normalizer
            case _:
                options = SMOOTHING if kind == "truth weighted" else {}
                logits = head(hidden).movedim(-1, 1)
                return F.cross_entropy(logits, y, reduction="sum", **options) / normalizer


def targets(kind, micro_batches, data_ranks):
    """[A, P, B, T]; those of rank r are its data-parallel rank's, cut along the tokens."""
    parts = dist.get_world_size() // data_ranks
    y = torch.randint(V, (micro_batches, data_ranks, B, parts, T // parts))
    share = torch.linspace(0, 1, data_ranks * parts).view(data_ranks, 1, parts, 1)
    match kind:
        case "unequal":
            y[torch.rand(y.shape) < share] = -100
        case "one rank ignored":
            y[torch.rand(y.shape) < 0.2] = -100
            y[:, 0, :, 0] = -100
        case "one micro-batch ignored":
            y[0, -1, :, -1] = -100
        case "one rank only":
            y.masked_fill_(share < 1, -100)
        case "nothing":
            y.fill_(-100)
    return y.flatten(3)


@functools.cache
def meshes(data_ranks, parts):
    """Returns the mesh of the two dimensions, and that of all ranks."""
    mesh = mesh_of(data_ranks, parts, mesh_dim_names=("data", "sequence"))
    return mesh, mesh_of(data_ranks * parts)


def run(kind, rank):
    torch.set_default_dtype(torch.float64)
    wrapper, data_ranks, pattern, micro_batches, loss_kind = kind.split(", ")
    data_ranks, micro_batches = int(data_ranks), int(micro_batches)
    parts = dist.get_world_size() // data_ranks
    torch.manual_seed(0)
    inner, alone = Model(), Model()
    alone.load_state_dict(inner.state_dict())
    y = targets(pattern, micro_batches, data_ranks)
    x = torch.randn(*y.shape, D)

    mesh, flat = meshes(data_ranks, parts)
    place, part = mesh.get_coordinate()
    x_ABtD, y_ABt = (each[:, place].chunk(parts, 2)[part] for each in (x, y))
    weight = CLASS_WEIGHT if loss_kind == "weighted" else None
    group = mesh if wrapper == "fsdp" else None
    normalizer = lowtide.tokens_per_rank(list(y_ABt), group=group, weight=weight)
    model = DistributedDataParallel(inner) if wrapper == "ddp" else fully_shard(inner, mesh=flat)
    total = 0.0
    for step, (x_BtD, y_Bt) in enumerate(zip(x_ABtD, y_ABt)):
        last = step == micro_batches - 1
        if wrapper == "fsdp":
            model.set_requires_gradient_sync(last)
        with contextlib.nullcontext() if last or wrapper == "fsdp" else model.no_sync():
            loss = model(loss_kind, x_BtD, y_Bt, normalizer)
            loss.backward()
        total += loss.detach()
    dist.all_reduce(total)

    counted = torch.ones_like(y, dtype=torch.float64) if weight is None else CLASS_WEIGHT[y.clamp(min=0)]
    count = counted.masked_fill(y == -100, 0).sum()
    expected = alone(f"truth {loss_kind}", x.flatten(0, 2), y.flatten(0, 2), count.clamp(min=1))
    expected.backward()
    pairs = zip(inner.parameters(), alone.parameters())
    errors = [(whole(one.grad) - other.grad).abs().max().item() for one, other in pairs]
    torch.testing.assert_close(normalizer, count / dist.get_world_size())
    loss, truth = (total / dist.get_world_size()).item(), expected.item()
    if pattern == "nothing":
        assert loss != loss, loss  # NaN
        # 0 over 0, written by the caller, has no gradient either.
        return {
            "gradient": 0.0 if loss_kind == "log-probs" else torch.tensor(errors).max().item(),
            "loss": 0.0,
        }
    return {"gradient": torch.tensor(errors).max().item(), "loss": abs(loss - truth)}
