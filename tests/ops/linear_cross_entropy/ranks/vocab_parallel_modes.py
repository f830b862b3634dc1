"""What test_vocab_parallel.py runs as several processes, beside the matrix of
vocab_parallel_ranks.py: ways to differentiate, kinds of heads, bad arguments, collectives, memory.
A scenario returns what it counted.

Shapes: N tokens, D features, V classes of all ranks.
"""

import contextlib
import itertools
import json
import os
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.core import collectives
from lowtide.ops.linear_cross_entropy import dispatch
from lowtide.ops.linear_cross_entropy.definition.head import VocabShard
from lowtide.ops.linear_cross_entropy.ranks import equal_values
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.budgets import dense
from tests.support.loss import check, check_log_probs, make_inputs, planned, rows_for
from tests.support.rank_errors import raised, raised_by_values
from tests.support.ranks import DEVICE, mesh_of
from tests.support.rehearsals import in_rehearsal

N, D, V = 24, 6, 24


class Place:
    """The slices of one rank, in equal shards of V classes and N tokens."""

    def __init__(self, size: int = V) -> None:
        self.rank, self.ranks, self.group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
        self.V_r = size // self.ranks
        self.classes = slice(self.rank * self.V_r, (self.rank + 1) * self.V_r)
        self.tokens = slice(self.rank * N // self.ranks, (self.rank + 1) * N // self.ranks)

    def leaf(self, tensor: Tensor, part: slice | None = None) -> Tensor:
        own = tensor.detach() if part is None else tensor.detach()[part]
        return own.clone().requires_grad_()

    def whole(self, own: Tensor) -> Tensor:
        """The parts of all ranks, in order."""
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, own)
        return torch.cat(found)


def made(*, rows: int = N, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(5)
    return make_inputs(rows, D, V, device=DEVICE, dtype=dtype, **options)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-11) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def positions() -> None:
    """K-dimensional losses, with class indices and probabilities, a mean and its rows."""
    for dtype, tolerance in ((torch.float64, 1e-11), (torch.float32, 1e-4)):
        positions_in(dtype, tolerance)


def positions_in(dtype: torch.dtype, tolerance: float) -> None:
    place, P = Place(), 3
    torch.manual_seed(1)
    x, w = torch.randn(N, D).double(), torch.randn(V, P, D).double()
    bias, target = torch.randn(V, P).double(), torch.randint(V, (N, P))
    target[torch.rand(N, P) < 0.2] = -100
    soft = torch.randn(N, V, P).double().softmax(1)
    for label, cut in ((target, target), (soft, soft[:, place.classes].to(dtype))):
        for reduction in ("mean", "none"):
            leaves = [place.leaf(each) for each in (x, w, bias)]
            logits = torch.einsum("nd,vpd->nvp", leaves[0], leaves[1]) + leaves[2]
            expected = F.cross_entropy(logits, label, reduction=reduction)
            wanted = torch.autograd.grad(expected.square().sum(), leaves)
            own = [place.leaf(x), place.leaf(w, place.classes), place.leaf(bias, place.classes)]
            own = [place.leaf(each.to(dtype)) for each in own]
            found = lowtide.linear_cross_entropy(
                own[0], own[1], cut, linear_bias=own[2], reduction=reduction, group=place.group
            )
            close(found.double(), expected.detach(), tolerance)
            gradients = [each.double() for each in torch.autograd.grad(found.square().sum(), own)]
            close(gradients[0], wanted[0], tolerance)
            for each, other in zip(gradients[1:], wanted[1:]):
                close(place.whole(each), other, tolerance)


def several_terms() -> None:
    """LoRA: x W^T + (x A^T) B^T, of which W and B are divided by classes."""
    place, r = Place(), 2
    torch.manual_seed(2)
    x, w, a, b = (torch.randn(*size).double() for size in ((N, D), (V, D), (r, D), (V, r)))
    target = torch.randint(V, (N,))
    leaves = [place.leaf(each) for each in (x, w, a, b)]
    expected = F.cross_entropy(leaves[0] @ leaves[1].T + leaves[0] @ leaves[2].T @ leaves[3].T, target)
    wanted = torch.autograd.grad(expected, leaves)
    own = [place.leaf(x), place.leaf(w, place.classes), place.leaf(a), place.leaf(b, place.classes)]
    shard = VocabShard(place.group.group_name, place.ranks, place.classes.start, V)
    inputs, weights = (own[0], own[0] @ own[2].T), (own[1], own[3])
    found = dispatch.cross_entropy(inputs, weights, target, shard=shard, workspace=room(40_000))
    close(found, expected.detach())
    gradients = torch.autograd.grad(found, own)
    for each, other, divided in zip(gradients, wanted, (False, True, False, True)):
        close(place.whole(each) if divided else each, other)


def wanted_gradients() -> None:
    """Each combination of gradients, for a mean and for rows."""
    place, inputs = Place(), made(bias=True)
    for reduction in ("mean", "none"):
        for wants in ((True, False, False), (False, True, False), (False, False, True), (False,) * 3):
            leaves = [inputs.input, inputs.linear_weight, inputs.linear_bias]
            parts = (None, place.classes, place.classes)
            own = [place.leaf(*each).requires_grad_(want) for *each, want in zip(leaves, parts, wants)]
            loss = lowtide.linear_cross_entropy(
                own[0], own[1], inputs.target, linear_bias=own[2], group=place.group, reduction=reduction
            )
            expected = dense(inputs, reduction=reduction)
            close(loss.detach(), expected.detach())
            assert loss.requires_grad == any(wants)
            if any(wants):
                loss.sum().backward()
            whole = torch.autograd.grad(expected.sum(), leaves)
            for each, other, part, want in zip(own, whole, parts, wants):
                assert (each.grad is not None) == want
                if want:
                    close(each.grad, other if part is None else other[part])


def ways_to_differentiate() -> None:
    """A retained graph with other upstream gradients, a checkpoint, autocast; what is refused."""
    place, inputs = Place(), made()
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
    for reduction in ("mean", "none"):
        loss = lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, reduction=reduction)
        expected = dense(inputs, reduction=reduction)
        leaves = (inputs.input, inputs.linear_weight)
        for upstream in (1.5, -0.3):
            gradients = torch.autograd.grad(loss.sum() * upstream, (x, w), retain_graph=True)
            whole = torch.autograd.grad(expected.sum() * upstream, leaves, retain_graph=True)
            close(gradients[0], whole[0])
            close(gradients[1], whole[1][place.classes])
        again = checkpoint(
            lambda x, w, how=reduction: lowtide.linear_cross_entropy(
                x * 1.0, w, inputs.target, group=place.group, reduction=how
            ).sum(),
            *(x, w),
            use_reentrant=False,
        )
        gradients = torch.autograd.grad(again, (x, w))
        whole = torch.autograd.grad(expected.sum(), leaves)
        close(gradients[0], whole[0])
        for refused in (
            lambda loss=loss: torch.autograd.grad(loss.sum(), x, create_graph=True),
            lambda: torch.func.grad(
                lambda x: lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group)
            )(x),
            lambda: lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, backend="reference"),
        ):
            assert "has first derivatives by backward alone" in raised(refused)
    half = made(rows=rows_for(DEVICE, torch.bfloat16, N), dtype=torch.float32)
    x, w = place.leaf(half.input), place.leaf(half.linear_weight, place.classes)
    whole = [place.leaf(half.input), place.leaf(half.linear_weight)]
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = lowtide.linear_cross_entropy(x, w, half.target, group=place.group)
        expected = lowtide.linear_cross_entropy(*whole, half.target)
    assert loss.dtype == torch.float32
    loss.backward()
    expected.backward()
    if DEVICE == "cuda":  # where products of bfloat16 have results of bfloat16, those of each rank
        found = {"loss": loss.detach(), "input": x.grad, "linear_weight": place.whole(w.grad)}
        rounded = {name: found[name].bfloat16() for name in ("input", "linear_weight")}
        check(found | rounded, half.to(torch.bfloat16))
        return
    for found, one_process in (
        (loss, expected),
        (x.grad, whole[0].grad),
        (w.grad, whole[1].grad[place.classes]),
    ):
        close(found, one_process, 1e-5)


def half_precision() -> None:
    """float16 with a loss scale, and bfloat16 whose weight gradient is formed by class blocks."""
    place = Place(512)
    for dtype, workspace, upstream in (
        (torch.float16, None, 2.0**12),
        (torch.float16, None, 2.0**-12),
        (torch.bfloat16, None, 1.0),
        (torch.bfloat16, 80_000 if DEVICE == "cpu" else 170_000, 1.0),
    ):
        torch.manual_seed(5)
        inputs = make_inputs(rows_for(DEVICE, dtype, 48), 64, 512, device=DEVICE, dtype=dtype)
        x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
        backend = "torch" if DEVICE == "cpu" else "auto"
        plan = planned(
            replace(inputs, linear_weight=w), workspace, ranks=place.ranks, num_classes=512, backend=backend
        )
        assert (plan.weight_gradient == "class_blocks") == (workspace is not None)
        loss = lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, workspace=workspace)
        (loss * upstream).backward()
        actual = {"loss": loss.detach(), "input": x.grad, "linear_weight": place.whole(w.grad)}
        check(actual, inputs, upstream=upstream)


def padded_vocabulary() -> None:
    """Weights padded to as many rows on each rank, bias and class weights likewise; DTensors."""
    place, inputs, padded = Place(V + 8), made(bias=True, class_weight=True), V + 8
    options = {"label_smoothing": 0.1}
    expected = dense(inputs, **options)
    names = ("input", "linear_weight", "linear_bias")
    whole = dict(zip(names, torch.autograd.grad(expected, [getattr(inputs, name) for name in names])))

    def pad(tensor: Tensor) -> Tensor:
        rest = torch.full((padded - V, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        return torch.cat([tensor.detach(), rest])

    w, b, c = pad(inputs.linear_weight), pad(inputs.linear_bias), pad(inputs.weight)
    mesh = mesh_of(place.ranks)
    for dtensor in (False, True):
        x = place.leaf(inputs.input)
        own = [place.leaf(w, place.classes), place.leaf(b, place.classes)]
        how: dict[str, Any] = {"group": place.group}
        weight = c[place.classes]
        if dtensor:
            own, how = [distribute_tensor(each, mesh, [Shard(0)]).requires_grad_() for each in (w, b)], {}
            weight = distribute_tensor(c, mesh, [Shard(0)])
        loss = lowtide.linear_cross_entropy(
            x, own[0], inputs.target, linear_bias=own[1], weight=weight, num_classes=V, **how, **options
        )
        loss.backward()
        close(loss.detach(), expected.detach())
        close(x.grad, whole["input"])
        for each, name in zip(own, names[1:]):
            gradient = each.grad.to_local() if dtensor else each.grad
            gradient = place.whole(gradient)
            close(gradient[:V], whole[name])
            assert not gradient[V:].any()


def extremes() -> None:
    """Ties, classes excluded by a bias of -inf, NaN, no tokens, and no valid token."""
    place, inputs = Place(), made()
    x, w = inputs.input.detach(), inputs.linear_weight.detach().clone()
    w[:] = w[: place.V_r].repeat(place.ranks, 1)  # the same classes on each rank
    target = inputs.target
    found = lowtide.linear_log_probs(x, w[place.classes], target, group=place.group)
    best = (x @ w[: place.V_r].T).argmax(1).masked_fill(target == -100, -1)
    assert torch.equal(found.argmax, best)

    w = inputs.linear_weight.detach()
    for first, last in ((0, place.V_r), (place.V_r - 1, V - 1)):  # whole shards, too
        bias = torch.zeros(V).double()
        bias[first:last] = -torch.inf
        allowed = torch.full((N,), V - 1)
        own = {"linear_bias": bias[place.classes], "group": place.group}
        found = lowtide.linear_log_probs(x, w[place.classes], allowed, **own)
        expected = lowtide.linear_log_probs(x, w, allowed, linear_bias=bias)
        for each, other in zip(found, expected):
            close(each, other)
        smooth = lowtide.linear_cross_entropy(x, w[place.classes], allowed, **own, label_smoothing=0.1)
        assert smooth == torch.inf

    nan = w.clone()
    nan[0] = torch.nan
    assert lowtide.linear_cross_entropy(x, nan[place.classes], target, group=place.group).isnan()

    for rows, label in ((x[:0], target[:0]), (x, torch.full_like(target, -100))):
        leaves = [place.leaf(rows), place.leaf(w, place.classes)]
        loss = lowtide.linear_cross_entropy(*leaves, label, group=place.group)
        assert loss.isnan()
        loss.backward()
        assert not any(each.grad.any() for each in leaves)


def ignored_rows() -> None:
    """What an ignored row holds, NaN or infinity, reaches no result or gradient, as in one."""
    place, inputs = Place(), made(bias=True, logit_scale=True)
    groups = [dist.new_group([rank]) for rank in range(place.ranks)]
    alone = {"group": groups[place.rank], "first_class": 0, "num_classes": V}
    target = inputs.target.clone()
    target[::3] = -100
    dirty = inputs.input.detach().clone()
    dirty[::6], dirty[3::6] = torch.nan, torch.inf
    every = slice(None)
    for tokens, classes, given in (
        (place.tokens, place.classes, {"group": place.group, "tokens_sharded": True}),
        (every, place.classes, {"group": place.group}),
        (every, every, {**alone, "tokens_sharded": True}),
    ):
        for reduction, workspace in product(("mean", "sum", "none", "log-probs"), (None, room(30_000))):
            results = []
            for x in (inputs.input.detach(), dirty):
                leaves = [place.leaf(x, tokens)]
                leaves += [place.leaf(each, classes) for each in (inputs.linear_weight, inputs.linear_bias)]
                leaves.append(place.leaf(inputs.logit_scale))
                options = {"linear_bias": leaves[2], "logit_scale": leaves[3], "workspace": workspace} | given
                if reduction == "log-probs":
                    found = lowtide.linear_log_probs(*leaves[:2], target[tokens], **options)
                    result = found.log_prob + 0.1 * found.entropy + 0.1 * found.logsumexp
                else:
                    options["reduction"] = reduction
                    result = lowtide.linear_cross_entropy(*leaves[:2], target[tokens], **options)
                results.append([result.detach(), *torch.autograd.grad(result.sum(), leaves)])
            for place_of, (clean, found) in enumerate(zip(*results)):
                assert clean.isfinite().all()
                if DEVICE == "cpu" or place_of == 0:  # on CUDA it may reach gradients, as is documented
                    close(found, clean)


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


def module_and_sequences() -> None:
    """LinearCrossEntropyLoss under parallelize_module; [B, S, D] by sequences; a DTensor's loss."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    place, inputs = Place(), made(bias=True, class_weight=True)
    mesh = mesh_of(place.ranks)
    criterion = lowtide.LinearCrossEntropyLoss(D, V, bias=True, weight=inputs.weight, dtype=torch.float64)
    with torch.no_grad():
        criterion.linear.weight.copy_(inputs.linear_weight)
        criterion.linear.bias.copy_(inputs.linear_bias)
    parallelize_module(criterion, mesh, {"linear": ColwiseParallel()})
    expected = dense(inputs)
    wanted = torch.autograd.grad(expected, (inputs.input, inputs.linear_weight, inputs.linear_bias))
    shape, S = (2, N // 2, D), N // 2
    whole = distribute_tensor(inputs.input.detach().view(shape), mesh, [Replicate()])
    labels = distribute_tensor(inputs.target.view(shape[:2]), mesh, [Replicate()])
    for placement in (Replicate(), Shard(1), Shard(0)):
        criterion.zero_grad()
        x = whole.redistribute(placements=[placement]).detach().requires_grad_()
        target = labels.redistribute(placements=[placement])
        loss = criterion(x, target)
        assert loss.placements == (Replicate(),)
        close(loss.to_local().detach(), expected.detach())
        loss.backward()
        assert x.grad.placements == (placement,)
        close(x.grad.full_tensor().view(N, D), wanted[0])
        close(criterion.linear.weight.grad.full_tensor(), wanted[1])
        close(criterion.linear.bias.grad.full_tensor(), wanted[2])
        rows = lowtide.linear_cross_entropy(x, criterion.linear.weight.detach(), target, reduction="none")
        assert rows.placements == (placement,)
        assert rows.shape == (2, S)
        expected_rows = dense(replace(inputs, linear_bias=None, weight=None), reduction="none")
        close(rows.full_tensor().view(N), expected_rows.detach())


# Bad arguments.


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


def errors_of_backward() -> None:
    """What raises on the last rank alone, before the ranks agree, is told to those waiting."""
    place, inputs = Place(), made()
    w, last = inputs.linear_weight.detach()[place.classes], place.ranks - 1

    def begun(reduction: str, part: slice, **given: Any) -> tuple[Tensor, Tensor]:
        x = place.leaf(inputs.input, part) * 1
        call = (x, w, inputs.target[part])
        if reduction == "log-probs":
            return x, lowtide.linear_log_probs(*call, group=place.group, **given).log_prob.sum()
        given["reduction"] = reduction
        return x, lowtide.linear_cross_entropy(*call, group=place.group, **given).sum()

    everywhere = ((slice(None), {}), (place.tokens, {"tokens_sharded": True}))
    for reduction, (part, given) in product(("none", "log-probs"), everywhere):
        x, loss = begun(reduction, part, **given)
        if place.rank == last:
            x.data.zero_()
            x.mul_(2)
        message = raised(loss.backward)
        assert "modified by an inplace operation" in message
        assert (f"rank {last} of the group raised an error" in message) == (place.rank != last)
        x, loss = begun(reduction, part, **given)
        message = raised(partial(torch.autograd.grad, loss, x, create_graph=place.rank == last))
        assert "no create_graph=True" in message
        close(begun(reduction, part, **given)[1].detach(), loss.detach())
    x, loss = begun("mean", slice(None))  # whose backward has no collective, so nobody is told
    message = raised(partial(torch.autograd.grad, loss, x, create_graph=place.rank == last))
    assert ("no create_graph=True" in message) == (place.rank == last)


class _WithoutGradient(torch.autograd.Function):
    """Its backward gives no gradient, as of a result that is not used."""

    @staticmethod
    def forward(ctx: Any, each: Tensor) -> Tensor:
        return each.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:  # type: ignore[override]
        return None


def results_without_gradient() -> None:
    """What has no upstream gradient on the last rank, or is not differentiated there at all."""
    place, inputs = Place(), made(ignored=0.0)
    rank, last, group = place.rank, place.ranks - 1, place.group
    w, names = inputs.linear_weight.detach()[place.classes], ("log_prob", "entropy", "logsumexp")

    def begun(reduction: str, part: slice, **given: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        x, own = place.leaf(inputs.input, part), place.leaf(w)
        call = (x, own, inputs.target[part])
        if reduction == "log-probs":
            return x, own, lowtide.linear_log_probs(*call, group=group, **given)._asdict()
        given["reduction"] = reduction
        return x, own, {"loss": lowtide.linear_cross_entropy(*call, group=group, **given)}

    def truth(use: Any) -> Any:
        """Gradients of all ranks' losses, where `use` says which results a rank uses."""
        x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight)
        logits = x @ w.T
        logp = logits.log_softmax(1)
        found = {
            "log_prob": logp.gather(1, inputs.target[:, None])[:, 0],
            "entropy": -(logp.exp() * logp).sum(1),
            "logsumexp": logits.logsumexp(1),
        }
        found["loss"] = -found["log_prob"]
        parts = [slice(each * N // place.ranks, (each + 1) * N // place.ranks) for each in range(last + 1)]
        used = [found[name][part] for each, part in enumerate(parts) for name in use(each)]
        return torch.autograd.grad(sum(each.square().sum() for each in used), (x, w))

    # Ranks with tokens of their own may use other results, or none.
    uses = {
        "one each": lambda each: [names[each % 3]],
        "more on the last": lambda each: names if each == last else ["log_prob"],
        "none on the last": lambda each: [] if each == last else ["entropy", "log_prob"],
        "loss": lambda each: [] if each == last else ["loss"],
    }
    for name, use in uses.items():
        kind = "none" if name == "loss" else "log-probs"
        x, own, found = begun(kind, place.tokens, tokens_sharded=True, workspace=room(30_000))
        total = sum(found[each].square().sum() for each in use(rank))
        if not use(rank):
            total = _WithoutGradient.apply(found["loss" if name == "loss" else "entropy"])
        total.backward()
        wanted = truth(use)
        close(x.grad, wanted[0][place.tokens])
        close(own.grad, wanted[1][place.classes])

    # Replicated tokens: ranks with other upstream gradients would have other gradients of one
    # input.
    _, _, found = begun("log-probs", slice(None))
    total = found["log_prob"].sum() if rank != last else _WithoutGradient.apply(found["log_prob"])
    assert "upstream gradients of log_prob" in raised(total.backward)
    _, _, found = begun("none", slice(None))
    total = found["loss"].sum() if rank != last else _WithoutGradient.apply(found["loss"])
    assert "upstream gradients of loss" in raised(total.backward)

    # Two calls of one shape, of which each rank uses another; a rank without backward that calls
    # again.
    for kind, (part, given) in product(
        ("none", "log-probs"), ((slice(None), {}), (place.tokens, {"tokens_sharded": True}))
    ):
        results = [next(iter(begun(kind, part, **given)[2].values())).sum() for _ in range(2)]
        message = raised(results[rank == last].backward)
        assert "the call that backward belongs to must be the same" in message, message
        assert "its loss must use the results of each" in message
        result = next(iter(begun(kind, part, **given)[2].values())).sum()
        message = raised(partial(begun, kind, part, **given) if rank == last else result.backward)
        assert "operator must be the same" in message, message
        assert "its loss must use the results of each" in message

    # A rank that never calls again: the others raise when their group's time is over.
    if DEVICE == "cuda":
        return  # NCCL ends their processes then
    short = dist.new_group(timeout=timedelta(seconds=2))
    result = lowtide.linear_log_probs(place.leaf(inputs.input), w, inputs.target, group=short)
    if rank != last:
        message = raised(result.log_prob.sum().backward)
        assert "waited for the others in linear_log_probs_backward" in message, message
        assert "if only times 0" in message
    dist.barrier()


# Collectives and memory.


@contextlib.contextmanager
def counted() -> Any:
    """The kind and the bytes of each collective, in order, without fingerprints of cards' tensors.

    tests/distributed/test_doctor.py counts these too.
    """
    found: list[tuple[str, int]] = []
    own = collectives.Group
    real = {name: getattr(own, name) for name in ("gather", "sum_", "scatter_sum")}

    def recording(name: str) -> Any:
        def record(self: Any, tensor: Tensor) -> Any:
            if not in_rehearsal() and (tensor.dtype != torch.long or tensor.numel() > 4):
                found.append((name, tensor.numel() * tensor.element_size()))
            return real[name](self, tensor)

        return record

    for name in real:
        setattr(own, name, recording(name))
    try:
        yield found
    finally:
        for name, function in real.items():
            setattr(own, name, function)


def collectives_of_a_step() -> dict[str, Any]:
    """What forward and backward move, for a call in chunks; the first entry is the agreement."""
    place, found = Place(), {}
    inputs = made(dtype=torch.float32, ignored=0.0)
    for name, options in {
        "mean": {},
        "mean, one chunk": {"workspace": None},
        "none": {"reduction": "none"},
        "smoothing": {"label_smoothing": 0.1},
        "class weights": {"weight": torch.ones(place.V_r)},
        "tokens": {"tokens_sharded": True},
        "frozen input": {"frozen": True},
    }.items():
        tokens = place.tokens if "tokens_sharded" in options else slice(None)
        x, w = place.leaf(inputs.input, tokens), place.leaf(inputs.linear_weight, place.classes)
        x.requires_grad_(not options.pop("frozen", False))
        given = {"workspace": 25_000 if DEVICE == "cpu" else 81_000, **options}
        with counted() as calls:
            loss = lowtide.linear_cross_entropy(x, w, inputs.target[tokens], group=place.group, **given)
            forward = len(calls)
            loss.sum().backward()
        found[name] = {"forward": calls[:forward], "backward": calls[forward:]}
    return found


def peak() -> dict[str, Any]:
    """Peak and largest allocation of a step whose logits would be far larger, on this rank."""
    N, D, V = 512, 16, 8192
    place = Place(V)
    torch.manual_seed(0)
    x, w = torch.randn(N, D), torch.randn(V, D)[place.classes].clone()
    target, workspace = torch.randint(V, (N,)), 1 << 20
    found = {}
    own = slice(place.rank * N // place.ranks, (place.rank + 1) * N // place.ranks)
    for name, tokens in {"replicated": slice(None), "tokens": own}.items():
        leaves = place.leaf(x, tokens), place.leaf(w)
        given = {"group": place.group, "workspace": workspace, "tokens_sharded": name == "tokens"}
        if DEVICE == "cuda":  # before libraries have their room
            lowtide.linear_cross_entropy(*leaves, target[tokens], **given).backward()
            for each in leaves:
                each.grad = None
        with lowtide.peak_memory(DEVICE) as peak:
            loss = lowtide.linear_cross_entropy(*leaves, target[tokens], **given)
            loss.backward()
        gradients = sum(each.grad.nbytes for each in leaves)
        found[name] = {"beyond": peak.bytes - gradients, "largest": peak.largest}
    return {**found, "workspace": workspace, "logits": N * place.V_r * 4}


def triton() -> None:
    """The Triton pass, which CUDA tensors take; on the CPU in its interpreter."""
    place, options = Place(), {"bias": True, "row_weight": True, "logit_scale": True}
    inputs = made(dtype=torch.float32, **options)
    more = {"label_smoothing": 0.1, "softcap": 4.0, "z_loss": 0.05}
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
    b, s = place.leaf(inputs.linear_bias, place.classes), place.leaf(inputs.logit_scale)
    given = {"linear_bias": b, "logit_scale": s, "group": place.group, "backend": "triton"}
    loss = lowtide.linear_cross_entropy(
        x, w, inputs.target, **given, row_weight=inputs.row_weight, workspace=room(60_000), **more
    )
    loss.backward()
    actual = {"input": x.grad, "linear_weight": place.whole(w.grad), "linear_bias": place.whole(b.grad)}
    check({"loss": loss.detach(), **actual, "logit_scale": s.grad}, inputs, **more)

    inputs = made(dtype=torch.float32)
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)
    found = lowtide.linear_log_probs(x, w, inputs.target, group=place.group, backend="triton")
    upstream = [torch.linspace(-1, 1, N).double(), torch.linspace(1, 2, N).double(), None]
    torch.autograd.backward(found[:2], [each.float() for each in upstream[:2]])
    results = {name: each.detach() for name, each in found._asdict().items()}
    gradients = {"input": x.grad, "linear_weight": place.whole(w.grad)}
    check_log_probs({**results, **gradients}, inputs, upstream)

    assert planned(inputs, None, backend="triton").engine == "logits_triton"
    with counted() as calls:
        lowtide.linear_cross_entropy(x, w, inputs.target, group=place.group, backend="triton").backward()
    assert calls == [("gather", 2048), ("gather", 3 * N * 4), ("sum_", N * D * 4)]


def compiled() -> None:
    """torch.compile of a call with a group: one graph, with the collectives inside the operator."""
    place, inputs = Place(), made(dtype=torch.float32)
    x, w = place.leaf(inputs.input), place.leaf(inputs.linear_weight, place.classes)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(x: Tensor, w: Tensor) -> Tensor:
        return lowtide.linear_cross_entropy(
            x * 2, w, inputs.target, group=place.group, first_class=place.classes.start, num_classes=V
        )

    loss = loss_of(x, w)
    loss.backward()
    doubled = replace(inputs, input=(2 * inputs.input.detach()).requires_grad_())
    actual = {"loss": loss.detach(), "input": x.grad / 2, "linear_weight": place.whole(w.grad)}
    check(actual, doubled)

    with pytest.MonkeyPatch.context() as patch:  # one host has read an earlier call's answer
        patch.setattr(equal_values, "differed", lambda _: ["target"] if place.rank == 0 else [])
        message = raised(lambda: loss_of(x, w))
    assert "target must be the same on all ranks" in message
    assert loss_of(x, w) == loss


def segments() -> None:
    """The same bits as one process with the same segments, for odd sizes and several chunks."""
    ranks = dist.get_world_size()
    for size, features, dtype in (
        (24, 6, torch.float32),
        (1000, 37, torch.float32),
        (512, 64, torch.bfloat16),
    ):
        place = Place(size)
        torch.manual_seed(3)
        inputs = make_inputs(61, features, size, bias=True, device=DEVICE, dtype=dtype)
        x, w, b = inputs.input, inputs.linear_weight, inputs.linear_bias
        own = {"linear_bias": b[place.classes], "group": place.group}
        for options in (
            {},
            {"label_smoothing": 0.1, "z_loss": 0.1},
            {"softcap": 3.0, "reduction": "none"},
            {"weight": torch.linspace(0.1, 1, size).to(dtype), "label_smoothing": 0.1},
        ):
            for workspace in (None, room(200_000)):
                given = {**options, "segments": 4, "workspace": workspace}
                alone = lowtide.linear_cross_entropy(x, w, inputs.target, linear_bias=b, **given)
                if "weight" in given:
                    given["weight"] = given["weight"][place.classes]
                found = lowtide.linear_cross_entropy(x, w[place.classes], inputs.target, **own, **given)
                assert torch.equal(alone, found), (size, options, (alone - found).abs().max())
        alone = lowtide.linear_log_probs(x, w, inputs.target, linear_bias=b, segments=4)
        found = lowtide.linear_log_probs(x, w[place.classes], inputs.target, **own, segments=4)
        assert all(torch.equal(*each) for each in zip(alone, found)), size
        sample = lowtide.linear_log_probs(x, w, inputs.target, linear_bias=b)
        assert (sample.log_prob - found.log_prob).abs().max() < 1e-4
    assert ranks in (2, 4)


def killed(rank: int, collective: str = "") -> None:
    """The last rank ends between two calls, or in a chunk's collective of the second one. The
    others raise, and say after how many seconds.
    """
    place, inputs = Place(), made()
    tokens = place.tokens if collective == "scatter_sum" else slice(None)
    x, w = place.leaf(inputs.input, tokens), place.leaf(inputs.linear_weight, place.classes)
    how = {"group": place.group, "tokens_sharded": tokens != slice(None), "workspace": room(25_000)}
    lowtide.linear_cross_entropy(x, w, inputs.target[tokens], **how).backward()
    begun, last = time.monotonic(), rank == place.ranks - 1
    if last and not collective:
        end({"kind": "killed"})
    if last:
        real, issued = getattr(collectives.Group, collective), itertools.count()

        def ending(self: Any, tensor: Tensor) -> Any:
            # The first gather is the agreement.
            if next(issued) == 1:
                end({"kind": f"killed {collective}"})
            return real(self, tensor)

        setattr(collectives.Group, collective, ending)
    try:
        lowtide.linear_cross_entropy(x, w, inputs.target[tokens], **how).backward()
    except RuntimeError as error:
        kind = f"killed {collective}".strip()
        end({"kind": kind, "error": str(error), "seconds": time.monotonic() - begun})


def end(found: dict[str, Any]) -> None:
    """Print what was found, and end without a barrier, as not all ranks are there."""
    print(json.dumps(found), flush=True)
    os._exit(0)


def run(kind: str, rank: int) -> dict[str, Any]:
    if kind.startswith("killed"):
        killed(rank, *kind.split()[1:])
    return globals()[kind]() or {}
