"""Scenarios of distillation with a divided student, and teachers of any kind."""

import copy
import functools
from itertools import product

import pytest
import torch
from torch import nn

import lowtide
from lowtide.distillation import forward_kl
from tests.distributed.shard_head.models import ROWS, D, V, refused
from tests.ops.distillation.helpers import Inputs, dense, fused
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks import room
from tests.support.ranks import RANKS, whole


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
