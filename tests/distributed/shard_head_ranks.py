"""Runs, as two processes of test_shard_head.py, models whose head lowtide.shard_head has divided,
beside one process that has all of the data, and beside FSDP2 alone.

Shapes: N tokens of a rank, D features, V classes.
"""

import copy
import functools
import re
import tempfile
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lowtide
from lowtide.distillation import forward_kl
from lowtide.ops.linear_cross_entropy import data_sharded
from tests.distributed.fsdp_ranks import Collectives
from tests.ops.distillation.helpers import Inputs, dense, fused
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.rank_errors import raised_in_backward
from tests.support.ranks import DEVICE, RANKS, generator, mesh_of

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


def loss_of(kind, model, x, y, normalizer, weights):
    """The loss of some rows by lowtide, over a normaliser or the mean's own."""
    hidden, head = model(x), model.head
    options = {"linear_bias": head.bias}
    if model.scale is not None:
        options["logit_scale"] = model.scale.reshape(())
    if "log-probs" in kind:
        out = lowtide.linear_log_probs(hidden, head.weight, y, **options)
        return -(out.log_prob * weights + 0.1 * out.entropy).sum() / normalizer
    if "module" in kind:
        return model.criterion(hidden, y, normalizer=normalizer)
    if "deferred" in kind:
        logits = head(hidden)
        total = F.cross_entropy(logits, y, reduction="sum") / normalizer
        return total + 0.1 * logits.logsumexp(-1).sum() / normalizer if "chunks" in kind else total
    if "options" in kind:
        options |= {
            "weight": CLASS_WEIGHT.to(x.dtype),
            "label_smoothing": 0.1,
            "z_loss": 0.01,
            "softcap": 5.0,
        }
        options["row_weight"] = weights
    if "none" in kind:
        loss = lowtide.linear_cross_entropy(hidden, head.weight, y, reduction="none", **options)
        return (loss * weights).sum() / normalizer
    if "sum" in kind:
        return lowtide.linear_cross_entropy(hidden, head.weight, y, reduction="sum", **options) / normalizer
    options["normalizer"] = None if "mean" in kind else normalizer
    return lowtide.linear_cross_entropy(hidden, head.weight, y, **options)


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


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(model):
    return {name: whole(each.grad) for name, each in model.named_parameters() if each.grad is not None}


def one_step(kind, rank, mesh):
    dtype = torch.float32 if "mixed" in kind else torch.float64
    x, y, weights = data(kind, dtype)
    inner, alone = build(kind, dtype), build(kind, dtype)
    model = sharded(kind, inner, mesh)
    deferral = lowtide.defer_logits(model, head=inner.head) if "deferred" in kind else None
    xs, ys, ws = (each.split(ROWS)[rank] for each in (x, y, weights))
    class_weight = CLASS_WEIGHT.to(dtype) if "options" in kind else None
    normalizer = lowtide.tokens_per_rank(ys, weight=class_weight).to(dtype)
    collectives, steps = Collectives(), 3 if "accumulated" in kind else 1
    with collectives:
        for step in range(steps):
            model.set_requires_gradient_sync(step == steps - 1)
            loss = loss_of(kind, inner if "fsdp" not in kind else model, xs, ys, normalizer, ws)
            loss.backward()
    count = normalizer * RANKS
    for _ in range(steps):
        truth = loss_of(kind.replace("deferred", "eager, deferred"), alone, x, y, count, weights)
        truth.backward()
    expected, found = gradients(alone), gradients(model)
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    errors = {
        name: ((found[name] - each).abs().max() / each.abs().max()).item() for name, each in expected.items()
    }
    value = loss.detach().clone()
    dist.all_reduce(value)
    fused = {} if deferral is None else {"fused": deferral.fused, "materialized": deferral.materialized}
    error = abs((value / RANKS - truth.detach()).item())
    return {"errors": errors, "loss": error, **collectives.counts, **fused}


def trained(kind, rank, mesh, steps=3, start=None):
    """(model, optimizer) after steps with clipped gradients."""
    inner = build(kind, torch.float64)
    model = sharded(kind, inner, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    norms = []
    if start is not None:
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": of_optimizer}, checkpoint_id=start)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=of_optimizer)
    for step in range(steps):
        seeded = generator(step)
        x = torch.randn(RANKS, 6, 4, generator=seeded, dtype=torch.float64)[rank]
        y = torch.randint(V, (RANKS, 6), generator=seeded)[rank]
        hidden = model(x)
        loss = lowtide.linear_cross_entropy(hidden, inner.head.weight, y, linear_bias=inner.head.bias)
        optimizer.zero_grad()
        loss.backward()
        norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1)).item())
        optimizer.step()
    return model, optimizer, norms


def same(one, other):
    assert one.keys() == other.keys(), (sorted(one), sorted(other))
    for name, each in one.items():
        assert type(each) is type(other[name]), name
        if isinstance(each, DTensor):
            assert each.placements == other[name].placements == (Shard(0),)
            assert each.to_local().shape == other[name].to_local().shape, name
        torch.testing.assert_close(whole(each), whole(other[name]), rtol=1e-10, atol=1e-12, msg=name)


def as_fsdp(kind, rank, mesh):
    """Training, clipping, optimizer state and state dicts are those of FSDP2 alone."""
    model, optimizer, norms = trained("bias", rank, mesh)
    theirs, their_optimizer, their_norms = trained("fsdp, bias", rank, mesh)
    same(model.state_dict(), theirs.state_dict())
    torch.testing.assert_close(norms, their_norms)
    for one, other in zip(optimizer.state.values(), their_optimizer.state.values(), strict=True):
        same(one, other)
    return {}


def checkpointed(kind, rank, mesh):
    """Saved by one, loaded by the other, either way round, and trained on: the same run."""
    box = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(box)
    straight, _, _ = trained("bias", rank, mesh, steps=3)
    for saver, loader in (("bias", "fsdp, bias"), ("fsdp, bias", "bias"), ("bias", "bias")):
        model, optimizer, _ = trained(saver, rank, mesh)
        path = Path(box[0]) / f"{saver} to {loader}"
        state, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": state, "optimizer": of_optimizer}, checkpoint_id=path)
        loaded, _, _ = trained(loader, rank, mesh, steps=0, start=path)
        same(loaded.state_dict(), straight.state_dict())
        after, _, _ = trained(loader, rank, mesh, steps=2, start=path)
        expected, _, _ = trained(saver, rank, mesh, steps=2, start=path)
        same(after.state_dict(), expected.state_dict())
    return {}


def assigned(kind, rank, mesh):
    """A state dict loaded by assignment brings other parameters, which are still known."""
    model, _, _ = trained("bias", rank, mesh, steps=1)
    state = {name: each.clone() for name, each in model.state_dict().items()}
    other = build("bias", torch.float64)
    own = lowtide.shard_head(other, mesh, head=other.head)
    assert own == set(other.head.parameters())
    other.load_state_dict(state, assign=True)
    x = torch.randn(3, D, dtype=torch.float64)
    y = torch.tensor([3, 5, 7])[: 2 + rank]
    loss = lowtide.linear_cross_entropy(x[: 2 + rank], other.head.weight, y, linear_bias=other.head.bias)
    assert loss.isfinite()
    with torch.no_grad():
        logits = other.eval().head(x)
    torch.testing.assert_close(logits, F.linear(x, *(whole(each) for each in other.head.parameters())))
    return {}


def scaled_apart(kind, rank, mesh):
    model = build(kind, torch.float64)
    lowtide.shard_head(model, mesh, head=model.head)
    x = torch.randn(3, D, dtype=torch.float64, requires_grad=True)

    def loss():
        return lowtide.linear_cross_entropy(x, model.head.weight, torch.tensor([3, 5, 7]))

    return {"said": raised_in_backward((loss() * (rank + 1)).backward, [x, model.head.weight], loss)}


def orders_of_backward(kind, rank, mesh):
    """Twice with the graph retained; two losses in one sum; other losses, or none, on one rank:
    gradients of all ranks' tokens, or an error on both.
    """
    head, alone, (x, y), (every_x, every_y) = divided_head("orders", rank, mesh)
    x, every_x = x.detach().requires_grad_(), every_x.detach().requires_grad_()

    def loss(targets=y, **options):
        return lowtide.linear_cross_entropy(x, head.weight, targets, **options)

    def gradients(*losses):
        for each in (x, head.weight):
            each.grad = None
        for each, options in losses:
            each.backward(**options)
        return x.grad.clone(), head.weight.grad.full_tensor()

    expected = F.cross_entropy(alone(every_x), every_y)
    dx, dw = torch.autograd.grad(expected, (every_x, alone.weight))
    own = dx.split(ROWS)[rank]  # the gradient of this rank's own loss; the mean over ranks is taken later

    one = loss()
    twice = gradients((one, {"retain_graph": True}), (one, {}))
    both = gradients((loss() + loss(), {}))
    first, second = loss(), loss()
    apart = gradients((second, {}), (first, {}))
    for found in (twice, both, apart):
        torch.testing.assert_close(found[0], 2 * RANKS * own)
        torch.testing.assert_close(found[1], 2 * dw)

    # Ranks take the two losses in different orders; their targets or scales may differ.
    for reduction in ("mean", "sum"):
        losses = loss(reduction=reduction), loss((y + 1) % V, reduction=reduction)
        for each in losses if rank else reversed(losses):
            said = raised_in_backward(each.backward, [x, head.weight])
            assert "the call that backward belongs to must be the same on all ranks" in said
    one, other = loss(), loss()
    if rank:  # leaves out its loss, and goes on
        refused("operator must be the same on all ranks", loss)
    else:
        said = raised_in_backward(one.backward, [x, head.weight])
        assert "operator must be the same on all ranks" in said
    other.backward()  # the ranks are together again

    # A rank that leaves out its loss and never comes back: the others raise when their group's time
    # is over.
    if DEVICE == "cuda":
        return {}  # there the work that waits is the card's, and NCCL ends the process
    short = dist.new_group(timeout=timedelta(seconds=2))
    left_out = data_sharded._MeanOfLosses.apply(x.sum(), short)
    if rank == 0:
        with pytest.raises(RuntimeError, match="waited for the others in backward of a loss"):
            left_out.backward()
    dist.barrier()
    return {}


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
    """Tokens are counted by the ranks of a group alone."""
    group, alone, y = dist.new_group([0]), DeviceMesh(DEVICE, [0]), torch.arange(3)
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


def distillation(kind, rank, mesh):
    """A student of `shard_head`, whose teacher is another such head, or whole on each rank: the
    losses and gradients of all ranks' rows, by the definition.
    """
    count = 0
    for divergence, reduction, teacher_kind, bias, workspace in product(
        ("forward", "reverse", "js 0.3"),
        ("mean", "sum", "none"),
        ("divided", "whole"),
        (False, True),
        (None, room(30_000)),
    ):
        torch.manual_seed(count)
        heads = [nn.Linear(size, V, bias=bias, dtype=torch.float64) for size in (D, D + 3)]
        alone = copy.deepcopy(heads)
        for head in heads if teacher_kind == "divided" else heads[:1]:
            lowtide.shard_head(head, mesh, head=head)
        xs = [torch.randn(sum(ROWS), head.in_features, dtype=torch.float64) for head in alone]
        ignored = torch.rand(sum(ROWS)) < 0.3
        upstream = torch.linspace(-1, 2, sum(ROWS), dtype=torch.float64)
        student_input = xs[0].split(ROWS)[rank].clone().requires_grad_()
        own = Inputs(
            *(student_input, heads[0].weight, xs[1].split(ROWS)[rank], heads[1].weight),
            *(heads[0].bias, heads[1].bias, ignored.split(ROWS)[rank]),
        )
        every = xs[0].clone().requires_grad_()
        whole_inputs = Inputs(
            *(every, alone[0].weight, xs[1], alone[1].weight, alone[0].bias, alone[1].bias, ignored)
        )
        options = {"reduction": reduction, "temperature": 1.3}
        found = fused(own, divergence, workspace=workspace, **options)
        truth = dense(whole_inputs, divergence, **options)
        if reduction == "none":
            expected = truth.split(ROWS)[rank].detach()
            (found * upstream.split(ROWS)[rank]).sum().backward()
            (truth * upstream).sum().div(RANKS).backward()
        else:
            truth = truth / (RANKS if reduction == "sum" else 1)
            expected = truth.detach()
            for each in (found, truth):
                each.backward()
        close = functools.partial(torch.testing.assert_close, rtol=1e-11, atol=1e-13)
        close(found.detach(), expected)
        close(student_input.grad, RANKS * every.grad.split(ROWS)[rank])  # averaged later
        for name, each in heads[0].named_parameters():
            close(whole(each.grad), alone[0].get_parameter(name).grad)
        assert all(each.grad is None for each in heads[1].parameters())
        count += 1
    return {"count": count}


def distillation_refused(kind, rank, mesh):
    """A sentence on each rank: teachers of other classes, options that the mesh says, copies."""
    student, teacher, other = (nn.Linear(D, size, bias=False) for size in (V, V, V + 4))
    plain = torch.randn(V, D)
    for head in (student, teacher, other):
        lowtide.shard_head(head, mesh, head=head)
    x = torch.randn(ROWS[rank], D)

    def call(w=student.weight, u=plain, **options):
        return forward_kl(x, w, x, u, **options)

    expected = call().detach()
    refused("teacher_weight must hold the 37 classes", call, u=plain[:-1])
    refused("teacher_weight must hold the 37 classes", call, u=other.weight)
    refused("teacher_weight lies on the mesh", call, u=teacher.weight.detach())
    refused("teacher_bias must hold the 37 classes", call, teacher_bias=torch.zeros(V - 1))
    refused("group must be left out", call, group=mesh.get_group())
    refused("student_bias must be that of the same head", call, student_bias=torch.zeros(V))
    refused("student_weight lies on the mesh", call, w=student.weight.detach(), u=teacher.weight.detach())
    refused("teacher_weight belongs to a head of lowtide.shard_head", call, w=plain, u=teacher.weight)
    refused("temperature must be the same on all ranks", call, temperature=1.0 + rank)
    with pytest.raises((ValueError, TypeError)) as raised:
        call(u=plain if rank else plain.double())
    assert ("rank 0 of the group raised" in str(raised.value)) == bool(rank)
    torch.testing.assert_close(call().detach(), expected)
    return {}


OTHERS = {
    "distillation": distillation,
    "distillation refused": distillation_refused,
    "positions": positions,
    "z-loss": z_loss,
    "deferred by chunks": deferred_by_chunks,
    "not a member": not_a_member,
    "known": known,
    "padded and refused": options,
    "wrong on one rank": wrong_on_one_rank,
    "as fsdp": as_fsdp,
    "checkpointed": checkpointed,
    "assigned": assigned,
    "scaled apart": scaled_apart,
    "orders of backward": orders_of_backward,
}


def run(kind, rank):
    mesh = mesh_of(RANKS)
    return OTHERS.get(kind, one_step)(kind, rank, mesh)
