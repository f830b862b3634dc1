"""Scenarios of calls with a divided head: its own parameters, options, errors, K dimensions,
losses.
"""

import copy
import functools
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lowtide
from tests.distributed.shard_head.models import CLASS_WEIGHT, ROWS, D, V, divided_head, refused
from tests.support.ranks import DEVICE, RANKS, whole


def known(kind, rank, mesh):
    """The head's own parameters and deferred copies are known at once; others are refused."""
    head, alone, (x, y), _ = divided_head("bias", rank, mesh)
    weight, bias = dict(head.named_parameters()).values()
    expected = F.linear(x, alone.weight, alone.bias).logsumexp(-1).masked_fill(y == -100, 0)
    found = lowtide.linear_log_probs(x, weight, y, linear_bias=bias).logsumexp
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    refused(" itself", lowtide.linear_log_probs, x, weight.detach(), y)
    refused(" itself", lowtide.linear_cross_entropy, x, head.state_dict()["weight"], y)
    lowtide.defer_logits(head, head=head)
    logits = head(x)
    assert type(logits).__name__ == "DeferredLogits"
    found = logits.detach().logsumexp(-1).masked_fill(y == -100, 0)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    return {}


def options(kind, rank, mesh):
    """Classes that pad the vocabulary stay out; options that the mesh says itself are refused."""
    head, alone, (x, y), (xs, ys) = divided_head("options", rank, mesh)
    real = V - 5
    y, ys = (each.clamp(max=real - 1) for each in (y, ys))
    truth = F.cross_entropy(F.linear(xs, alone.weight)[:, :real], ys)
    loss = lowtide.linear_cross_entropy(x, head.weight, y, num_classes=real)
    for each in (truth, loss):
        each.backward()
    torch.testing.assert_close(loss, truth, rtol=1e-14, atol=0)
    torch.testing.assert_close(whole(head.weight.grad), alone.weight.grad, rtol=1e-13, atol=1e-16)
    loss_of = functools.partial(lowtide.linear_cross_entropy, x, head.weight)
    refused("first_class must be left out", loss_of, y, first_class=0)
    refused("group must be left out", loss_of, y, group=mesh.get_group())
    refused("each of the head's 37 classes", loss_of, y, weight=CLASS_WEIGHT[:19])
    return {}


def wrong_on_one_rank(kind, rank, mesh):
    """An error of one rank is raised on both: none waits for the other."""
    head, _, (x, y), _ = divided_head("wrong", rank, mesh)
    loss_of = functools.partial(lowtide.linear_cross_entropy, x)
    float_target = torch.rand(len(y), V, dtype=x.dtype)
    refused("input must be the same on all ranks", loss_of, head.weight, y if rank else float_target)
    refused("must be the same on all ranks", loss_of, head.weight, y, normalizer=3.0 if rank else None)
    refused(
        "rank 0 of the group raised" if rank else "another Tensor",
        loss_of,
        head.weight,
        y,
        linear_bias=None if rank else torch.ones(V, dtype=x.dtype),
    )
    y[0] = y[0] if rank else V
    if DEVICE == "cuda":  # where a look at the targets would be to wait, and torch's own ends the process
        assert loss_of(head.weight, y, weight=CLASS_WEIGHT.to(x.dtype)).isnan()
        assert lowtide.tokens_per_rank(y, weight=CLASS_WEIGHT).isnan()
        for target in (y if rank else y.double(), y if rank else [y, 3]):
            if rank:
                assert lowtide.tokens_per_rank(target).isnan()
            else:
                with pytest.raises(TypeError):
                    lowtide.tokens_per_rank(target)
        assert lowtide.tokens_per_rank(y).item() == (sum(ROWS) - 1) / RANKS
        return {}
    with pytest.raises(IndexError, match="target must hold classes"):
        loss_of(head.weight, y, weight=CLASS_WEIGHT.to(x.dtype))
    counts = [(y, {"weight": CLASS_WEIGHT}), (y if rank else y.double(), {}), (y if rank else [y, 3], {})]
    for target, given in counts:
        with pytest.raises((IndexError, ValueError, TypeError)) as raised:
            lowtide.tokens_per_rank(target, **given)
        assert ("another rank of the group raised" in str(raised.value)) == bool(rank)
    assert lowtide.tokens_per_rank(y).item() == (sum(ROWS) - 1) / RANKS
    lowtide.defer_logits(head, head=head)
    for options in ({}, {"reduction": "sum"}, {"weight": CLASS_WEIGHT.to(x.dtype)}):
        with pytest.raises((IndexError, ValueError)) as raised:
            F.cross_entropy(head(x) * 1.5 + 1, y, **options)
        assert ("rank 0 of the group raised" in str(raised.value)) == bool(rank)
    return {}


def not_a_member(kind, rank, mesh):
    """Tokens are counted, and heads divided, by the ranks of a group alone."""
    group, alone, y = dist.new_group([0]), DeviceMesh(DEVICE, [0]), torch.arange(3)
    x, w = torch.ones(3, D), torch.ones(V, D)
    placed = DTensor.from_local(w, alone, [Shard(0)], run_check=False)
    if rank:
        refused("group must have this process", lowtide.linear_cross_entropy, x, w, y, group=group)
        refused("mesh must have this process", lowtide.linear_cross_entropy, x, placed, y)
        head = torch.nn.Linear(D, V)
        refused("mesh must have this process", lowtide.shard_head, head, alone, head=head)
    for each in (group, alone):
        if rank:
            refused("group must have this process as a member", lowtide.tokens_per_rank, y, group=each)
        else:
            assert lowtide.tokens_per_rank(y, group=each).item() == 3
    return {}


def deferred_by_chunks(kind, rank, mesh):
    """Losses without a fused form have the values and gradients of all ranks' tokens, too. A vector
    of all classes is no part of a divided bias."""
    for weight, bias, scale in (
        (None, "bias", 1.5),
        (CLASS_WEIGHT.double(), "bias", 1.5),
        (None, "", 1),
        (None, "bias", 1),
    ):
        for reduction in ("mean", "sum"):
            head, alone, (x, y), (xs, ys) = divided_head(f"{bias}, ignored", rank, mesh)
            lowtide.defer_logits(head, head=head)
            x, xs = x.clone().requires_grad_(), xs.clone().requires_grad_()
            shift = torch.linspace(0, 1, V, dtype=x.dtype)
            logits = head(x) * scale + shift
            found = F.cross_entropy(logits, y, weight, reduction=reduction)
            real = F.linear(xs, alone.weight, alone.bias) * scale + shift
            truth = F.cross_entropy(real, ys, weight, reduction=reduction)
            truth = truth / RANKS if reduction == "sum" else truth
            for each in (found, truth):
                each.backward()
            torch.testing.assert_close(found, truth, rtol=1e-13, atol=0)
            for name, each in alone.named_parameters():
                own = whole(head.get_parameter(name).grad)
                torch.testing.assert_close(own, each.grad, rtol=1e-12, atol=1e-15)
            expected = RANKS * xs.grad.split(ROWS)[rank]  # averaged later
            torch.testing.assert_close(x.grad, expected, rtol=1e-12, atol=1e-15)
    return {}


def positions(kind, rank, mesh):
    """A K-dimensional criterion: as one process where each rank has whole classes, and under FSDP2;
    else a sentence on all ranks."""
    P = 3
    for bias, classes, way in product((False, True), (V, V + 1), ("shard_head", "tensor parallel", "fsdp")):
        torch.manual_seed(0)
        criterion = lowtide.LinearCrossEntropyLoss(D, classes, out_features=(P,), bias=bias).double()
        alone, linear = copy.deepcopy(criterion), criterion.linear
        xs, ys = torch.randn(sum(ROWS), D, dtype=torch.float64), torch.randint(classes, (sum(ROWS), P))
        x, y = (xs, ys) if way == "tensor parallel" else (each.split(ROWS)[rank] for each in (xs, ys))
        if way == "fsdp":
            fully_shard(linear, mesh=mesh)
        elif way == "shard_head":
            lowtide.shard_head(criterion, mesh, head=linear)
        else:
            parallelize_module(criterion, mesh, {"linear": ColwiseParallel()})
        if way != "fsdp" and classes % RANKS:
            refused("as many whole classes on each rank, got 37 classes", criterion, x, y)
            continue
        normalizer = ys.numel() / (RANKS if way == "fsdp" else 1)
        options = {"normalizer": normalizer} if way == "fsdp" else {}
        for loss in (criterion(x, y, **options), alone(xs, ys)):
            loss.backward()
        for name, each in alone.linear.named_parameters():
            found = whole(dict(linear.named_parameters())[name].grad)
            torch.testing.assert_close(found, each.grad, rtol=1e-12, atol=1e-15, msg=f"{way} {name}")
    return {}


def z_loss(kind, rank, mesh):
    """The mean over all ranks' tokens, by its normaliser."""
    head, alone, (x, y), (xs, ys) = divided_head("z-loss", rank, mesh)
    count = lowtide.tokens_per_rank(y).to(x.dtype)
    loss = lowtide.losses.z_loss(x, head.weight, y, normalizer=count)
    truth = lowtide.losses.z_loss(xs, alone.weight, ys)
    for each in (loss, truth):
        each.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total / RANKS, truth.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(whole(head.weight.grad), alone.weight.grad, rtol=1e-12, atol=1e-15)
    return {}
