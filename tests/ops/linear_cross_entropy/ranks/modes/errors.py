"""Scenarios of calls that raise on every rank: bad arguments, what differs from an earlier call,
what a card tells later.

Shapes: N tokens, D features, V classes of all ranks.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import lowtide
from lowtide.ops.linear_cross_entropy.ranks import equal_values
from tests.ops.linear_cross_entropy.ranks.place import N, Place, V, close, made
from tests.support.budgets import dense
from tests.support.rank_errors import raised, raised_by_values
from tests.support.ranks import DEVICE, mesh_of


def told_later() -> None:
    """What a card found to differ in an earlier call is raised once on all ranks, whoever knows."""
    place, inputs = Place(), made()
    x, w = inputs.input.detach(), inputs.linear_weight.detach()[place.classes]

    def loss() -> Tensor:
        return lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group)

    expected = loss()
    if place.rank == place.ranks - 1:
        reached = SimpleNamespace(query=lambda: True)
        differs = torch.tensor([False, True], device="cpu")
        answer = equal_values._Answer(("row_weight", "target"), differs, reached)
        equal_values._answers[place.group] = [answer]
    message = raised(loss)
    assert "target must be the same on all ranks" in message, message
    assert "in an earlier call, whose results are NaN" in message
    assert torch.equal(loss(), expected)


def bad_arguments() -> None:
    """Each is an error on every rank, in time; and afterwards the group still works."""
    place, inputs = Place(), made()
    x, w, target, rank = inputs.input.detach(), inputs.linear_weight.detach(), inputs.target, place.rank
    own, last = w[place.classes], place.ranks - 1
    mesh = mesh_of(place.ranks)
    sharded = distribute_tensor(w, mesh, [Shard(0)])

    def loss(x: Any = x, w: Any = own, target: Any = target, **options: Any) -> Any:
        if not isinstance(w, DTensor) and "group" not in options:
            options["group"] = place.group
        return lambda: lowtide.linear_cross_entropy(x, w, target, **options)

    def partial(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor, mesh, [Partial()], run_check=False)

    def log_probs_gradient() -> Any:
        """Of a call whose entropy has an upstream gradient on the last rank alone."""
        found = lowtide.linear_log_probs(place.leaf(x), own, target, group=place.group)
        results = [found.log_prob] + [found.entropy] * (rank == last)
        return lambda: torch.autograd.backward(results, [torch.ones_like(each) for each in results])

    leaf = x.clone().requires_grad_(rank == last)
    swapped = torch.arange(N) % V  # and with the places 1 and 3 changed for others: the same sum of i * t_i
    swapped = swapped + (rank == last) * torch.tensor([2, -1] + [0] * (N - 2))
    rows = torch.linspace(1, 2, N)
    divided = {"x": x[place.tokens], "target": target[place.tokens], "tokens_sharded": True}
    replicated, target_0 = (
        distribute_tensor(w, mesh, [Replicate()]),
        distribute_tensor(target, mesh, [Shard(0)]),
    )
    cases = {
        "linear_weight must be divided by classes": [
            loss(w=distribute_tensor(w, mesh, [Shard(1)])),
            loss(w=partial(w)),
            loss(w=distribute_tensor(w, mesh, [Replicate()])),
        ],
        "input must be replicated on linear_weight's mesh": [
            loss(x=partial(x), w=sharded),
            loss(x=distribute_tensor(x, mesh, [Shard(1)]), w=sharded),
        ],
        "target must have placements": [
            loss(x=distribute_tensor(x, mesh, [Shard(0)]), w=sharded, target=distribute_tensor(target, mesh)),
        ],
        "linear_bias must have placements": [
            loss(w=sharded, linear_bias=distribute_tensor(w[:, 0], mesh, [Replicate()])),
        ],
        "linear_bias must have shape": [loss(linear_bias=w[:, 0])],
        "must hold each of the num_classes": [
            loss(w=w, first_class=0, num_classes=V),
            loss(w=w, first_class=place.classes.start, num_classes=V),
            loss(num_classes=V + 1),
            loss(first_class=0, num_classes=V),
            loss(w=own[rank:], first_class=place.classes.start, num_classes=V),
        ],
        "num_classes must be the same": [loss(num_classes=V + rank)],
        "input's tokens must be the same": [loss(x=x[rank:], target=target[rank:])],
        "target must be the same on all ranks": [
            loss(target=(target + rank).clamp(0, V - 1)),
            loss(x=x[place.tokens], target=target[place.tokens]),
            loss(target=swapped.clamp(0, V - 1)),
        ],
        "row_weight must be the same on all ranks": [loss(row_weight=rows.flip(0) if rank == last else rows)],
        "normalizer must be the same": [
            loss(normalizer=1.0 + (rank == last)),
            loss(**divided, normalizer=torch.tensor(1.0 + (rank == last))),
        ],
        "logit_scale must be the same": [
            loss(logit_scale=0.5 + (rank == last)),
            loss(**divided, logit_scale=0.5 + (rank == last)),
        ],
        "upstream gradients of log_prob, entropy, logsumexp must be the same": [log_probs_gradient()],
        "requires_grad of": [loss(x=leaf)],
        "arguments must be the same": [loss(linear_bias=own[:, 0].clone() if rank == last else None)],
        "softcap must be the same": [loss(softcap=2.0 + rank)],
        "segments=5": [loss(segments=5)],
        f"rank {last} of the group raised an error|workspace must hold": [
            loss(workspace=1 if rank == last else None)
        ],
        f"rank {last} of the group raised an error|linear_weight must be divided by classes": [
            loss(w=replicated if rank == last else sharded)
        ],
        f"rank {last} of the group raised an error|target must have placements": [
            loss(w=sharded, target=target_0 if rank == last else target)
        ],
        f"rank {last} of the group raised an error|num_classes must be at least": [
            loss(num_classes=0 if rank == last else V)
        ],
        f"rank {last} of the group raised an error|target must have shape": [
            loss(target=target[1:] if rank == last else target)
        ],
        f"rank {last} of the group raised an error|input must be a torch.Tensor": [
            loss(x=x.tolist() if rank == last else x)
        ],
        "group must be a torch.distributed.ProcessGroup": [loss(group=mesh)],
        "group must be given with": [lambda: lowtide.linear_cross_entropy(x, own, target, num_classes=V)],
        "leave them out": [loss(w=sharded, group=place.group)],
        "linear_bias must be this rank's own tensor": [loss(linear_bias=distribute_tensor(w[:, 0], mesh))],
        "input must be the same on all ranks where target holds": [
            loss(target=torch.rand(N, place.V_r).double(), tokens_sharded=True)
        ],
        "input must be a plain tensor where": [
            lambda: lowtide.linear_cross_entropy(distribute_tensor(x, mesh), w, target)
        ],
        "segments must be at least 1": [loss(segments=0)],
    }
    by_values = ("target must be", "row_weight must be", "normalizer must be", "logit_scale must be")
    expected = dense(inputs).detach()
    for words, calls in cases.items():
        for number, call in enumerate(calls):
            if words.startswith(by_values) and "same" in words:
                message = raised_by_values(call, loss())
            else:
                message = raised(call)
            assert any(each in message for each in words.split("|")), f"{words} {number}: {message}"
            close(loss()(), expected)


def later_calls() -> None:
    """What differs from an earlier call on one rank: tokens, error, frozen weight, workspace."""
    place, inputs = Place(), made(ignored=0.0)
    x, w, target = inputs.input.detach(), inputs.linear_weight.detach(), inputs.target
    own, last, expected = w[place.classes], place.ranks - 1, dense(inputs, reduction="none").detach()
    for counts in ((3, 3), (5, 5), (3, 5), (3, 4), (0, 5)):  # tokens of each other rank, and of the last rank
        first, tokens = 4 * place.rank, counts[place.rank == last]
        sizes = [counts[rank == last] for rank in range(place.ranks)]
        part = slice(first, first + tokens)
        taken = torch.cat([torch.arange(4 * rank, 4 * rank + size) for rank, size in enumerate(sizes)])
        found = lowtide.linear_cross_entropy(
            place.leaf(x, part), own, target[part], group=place.group, tokens_sharded=True
        )
        close(found.detach(), expected[taken].mean())

    def loss(weight: Tensor = own, **options: Any) -> Tensor:
        return lowtide.linear_cross_entropy(x, weight, target, group=place.group, **options)

    leaf = place.leaf(own)
    close(loss(leaf).detach(), expected.mean())
    message = raised(lambda: loss(leaf, label_smoothing=2.0 * (place.rank == last)))
    assert "label_smoothing must be in" in message
    assert ("rank" in message) == (place.rank != last)
    leaf.requires_grad_(place.rank != last)
    assert "requires_grad of" in raised(lambda: loss(leaf))

    # The first rank holds most classes and few tokens: only for the most tokens of a rank it lacks
    # room.
    least = (60_000 if DEVICE == "cpu" else 100_000) + 380_000 * place.ranks
    classes = 10 if place.rank else 5000
    first = 5000 + 10 * (place.rank - 1) if place.rank else 0
    tokens = 3000 if place.rank else 2
    message = raised(
        lambda: lowtide.linear_cross_entropy(
            *(place.leaf(torch.ones(tokens, 4)), torch.ones(classes, 4), torch.zeros(tokens).long()),
            **{"group": place.group, "first_class": first, "num_classes": 5000 + 10 * last},
            **{"tokens_sharded": True, "workspace": least},
        )
    )
    assert f"one row of 5000 logits, and vectors of {3000 * place.ranks} tokens" in message
    assert ("rank 0 of the group raised" in message) == (place.rank > 0)
    close(loss(), expected.mean())
