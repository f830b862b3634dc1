"""Scenarios of a step of evenly divided heads: its memory, its collectives, and torch.compile.

Shapes: N rows, V classes of all ranks.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import lowtide
from lowtide.core.collectives import Group
from tests.ops.distillation.divided.matrix import make_inputs
from tests.ops.distillation.helpers import Inputs, fused
from tests.support.ranks import DEVICE


def peak() -> dict[str, Any]:
    """Peak of a step whose logits would be far larger, on this rank, beyond its gradients."""
    N, D, V, workspace = 512, 16, 8192, 1 << 21
    inputs = make_inputs(N, D, V, D, ignored=0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * V // ranks, (rank + 1) * V // ranks)
    rows = slice(rank * N // ranks, (rank + 1) * N // ranks)
    found = {}
    for name, part in {"replicated": slice(None), "tokens": rows}.items():
        x = inputs.student_input.detach()[part].clone().requires_grad_()
        w = inputs.student_weight.detach()[mine].clone().requires_grad_()
        own = Inputs(x, w, inputs.teacher_input[part], inputs.teacher_weight[mine])
        given = {"group": dist.group.WORLD, "tokens_sharded": name == "tokens", "workspace": workspace}
        if DEVICE == "cuda":  # before libraries have their room
            fused(own, "js 0.5", **given).backward()
            x.grad = w.grad = None
        with lowtide.peak_memory(DEVICE) as peak:
            fused(own, "js 0.5", **given).backward()
        found[name] = peak.bytes - x.grad.nbytes - w.grad.nbytes
    return {**found, "workspace": workspace, "logits": 2 * N * V // ranks * 4}


def compiled() -> None:
    """torch.compile of a call with a group: one graph, with collectives inside the operators."""
    inputs = make_inputs(24, 6, 24, 6, ignored=0)
    own, given = parts_of_even(inputs)
    for reduction in ("mean", "none"):
        loss_of = torch.compile(fused, fullgraph=True, backend="aot_eager")
        loss = loss_of(own, "forward", reduction=reduction, **given)
        leaves = (own.student_input, own.student_weight)
        found = torch.autograd.grad(loss.sum(), leaves)
        expected = torch.autograd.grad(fused(own, "forward", reduction=reduction, **given).sum(), leaves)
        for each, other in zip(found, expected):
            torch.testing.assert_close(each, other)


def moved() -> dict[str, Any]:
    """The bytes that a step moves, and the largest number of rows that are gathered."""
    found = []
    real = {name: getattr(Group, name) for name in ("gather", "sum_", "scatter_sum")}

    def recording(name: str) -> Any:
        def record(self: Any, tensor: Tensor) -> Any:
            found.append((name, tensor.numel() * tensor.element_size()))
            return real[name](self, tensor)

        return record

    inputs = make_inputs(24, 6, 24, 6, ignored=0)
    own, given, *_ = parts_of_even(inputs)
    result = {}
    for divergence in ("forward", "js 0.5"):
        found.clear()
        for name in real:
            setattr(Group, name, recording(name))
        try:
            fused(own, divergence, **given).backward()
        finally:
            for name, function in real.items():
                setattr(Group, name, function)
        result[divergence] = [*found]
    return result


def parts_of_even(inputs: Inputs) -> tuple[Inputs, dict[str, Any]]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
    own = replace(
        inputs,
        student_weight=inputs.student_weight.detach()[mine].requires_grad_(),
        teacher_weight=inputs.teacher_weight[mine],
    )
    return own, {"group": dist.group.WORLD}
