"""Scenarios of calls that raise on every rank: bad arguments, and weights that are divided
otherwise.

Shapes: N rows, V classes of all ranks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lowtide
from tests.ops.distillation.divided.matrix import N, V, make_inputs
from tests.ops.distillation.helpers import Inputs, fused
from tests.support.rank_errors import raised, raised_by_values
from tests.support.ranks import mesh_of


def errors() -> None:
    """Each is an error on every rank, in time, also in backward; the group still works then."""
    inputs = make_inputs(N, 5, V + 1, 4, dtype=torch.float64)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    V_r = (V + 1) // (last + 1)
    mine = slice(rank * V_r, (rank + 1) * V_r)
    mesh = mesh_of(last + 1)
    x, t = inputs.student_input.detach(), inputs.teacher_input
    w, u = inputs.student_weight.detach(), inputs.teacher_weight
    group = dist.group.WORLD

    def call(x=x, w=w[mine], t=t, u=u[mine], divergence="forward", **given: Any) -> Any:
        given = {"group": group, "ignored": inputs.ignored} | given
        ignored = given.pop("ignored")
        return lambda: fused(Inputs(x, w, t, u, ignored=ignored), divergence, **given)

    divided = [distribute_tensor(each, mesh, [Shard(0)]) for each in (w, u)]
    flipped = inputs.ignored.flip(0) if rank == last else inputs.ignored
    cases = {
        "teacher_weight must be divided over ranks as student_weight is": [
            call(w=divided[0], group=None, u=u),
        ],
        "teacher_weight must be divided by classes": [
            call(w=divided[0], group=None, u=distribute_tensor(u, mesh, [Replicate()])),
        ],
        "student_weight must be this rank's own rows": [call(w=divided[0])],
        "student_input must be replicated on student_weight's mesh": [
            call(x=distribute_tensor(x, mesh, [Shard(1)]), w=divided[0], u=divided[1], group=None)
        ],
        "temperature must be the same": [call(temperature=1.0 + (rank == last))],
        "ignored must be the same": [call(ignored=flipped)],
        "must hold each of the num_classes": [call(first_class=0, num_classes=V + 1)],
        "reduction must be the same": [call(reduction="sum" if rank == last else "mean")],
        "requires_grad of student_input": [call(x=x.clone().requires_grad_(rank == last))],
        f"rank {last} of the group raised an error|beta must be between": [
            call(divergence="js 1.5" if rank == last else "js 0.5")
        ],
        f"rank {last} of the group raised an error|workspace must": [
            call(workspace=1 if rank == last else None)
        ],
    }
    expected = fused(replace(inputs, student_input=x), "forward").detach()
    for words, calls in cases.items():
        for each in calls:
            message = raised_by_values(each, call()) if words.startswith("ignored") else raised(each)
            assert any(part in message for part in words.split("|")), f"{words}: {message}"
            torch.testing.assert_close(call()(), expected)
    # Backward: of other calls, without an upstream gradient, and of higher order.
    leaf = x.clone().requires_grad_()
    rows = {"reduction": "none"}
    two = [call(x=leaf, **rows)() for _ in range(2)]
    message = raised(two[rank == last].sum().backward)
    assert "the call that backward belongs to" in message, message
    loss = call(x=leaf, **rows)()
    message = raised(lambda: torch.autograd.grad(loss.sum(), leaf, create_graph=rank == last))
    assert "first derivatives by backward alone" in message, message
    message = raised(lambda: torch.func.grad(lambda x: call(x=x)())(x))
    assert "first derivatives by backward alone" in message, message
    mean = call(x=leaf)()
    mean.backward(retain_graph=True)
    first = leaf.grad.clone()
    mean.backward()
    torch.testing.assert_close(leaf.grad, 2 * first)


def fsdp() -> None:
    """A weight that FSDP2 shards: its ranks have tokens of their own, so it is not divided."""
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of(dist.get_world_size())
    x = torch.randn(4, 6)
    heads = [torch.nn.Linear(6, 24, bias=False) for _ in range(2)]
    for head in heads:
        fully_shard(head, mesh=mesh)
    weights = [head.weight for head in heads]
    plain = torch.randn(24, 6)
    for message, pair in {
        "student_weight is sharded by FSDP2": weights,
        "which must be no unit of its own (leave out fully_shard(head))": weights,
        "teacher_weight is sharded by FSDP2": (plain, weights[1]),
        "student_weight must be the parameter that FSDP2 shards": (weights[0].detach(), plain),
        "student_weight must be the parameter itself": (weights[0].full_tensor(), plain),
    }.items():
        found = raised(lambda pair=pair: fused(Inputs(x, pair[0], x, pair[1]), "forward"))
        assert message in found, found
    whole = weights[1].detach().full_tensor()  # as the errors say of a teacher
    found, expected = (fused(Inputs(x, plain, x, each), "forward") for each in (whole, whole.clone()))
    assert torch.equal(found, expected)
    divided = torch.nn.Linear(6, 24, bias=False)
    lowtide.shard_head(torch.nn.Sequential(divided), mesh, head=divided)
    assert "teacher_weight belongs to a head of lowtide.shard_head" in raised(
        lambda: fused(Inputs(x, plain, x, divided.weight), "forward")
    )
