"""Scenarios of losses at extremes: excluded classes, a student near its teacher, and Triton's
statistics of parts.

Shapes: N rows, V classes of all ranks.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from tests.ops.distillation.divided.matrix import N, make_inputs, small
from tests.ops.distillation.helpers import DIVERGENCES, differentiate, fused


def excluded() -> None:
    """Classes that a bias of -inf excludes, whole shards among them; the truth is one process's."""
    V = 24
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(rank * V // ranks, (rank + 1) * V // ranks)
    for divergence, side, (first, last) in product(
        DIVERGENCES, ("student", "teacher"), ((0, V // ranks), (V // ranks - 1, V - 1))
    ):
        torch.manual_seed(4)
        inputs = make_inputs(N, 5, V, 4, dtype=torch.float64, bias=True)
        with torch.no_grad():
            getattr(inputs, f"{side}_bias")[first:last] = -torch.inf
        classes = {name: each for name, each in inputs.items() if "weight" in name or "bias" in name}
        own = {name: each.detach()[mine].requires_grad_(each.requires_grad) for name, each in classes.items()}
        own["student_input"] = inputs.student_input.detach().requires_grad_()
        own_inputs = replace(inputs, **own)
        for reduction in ("mean", "none"):
            given = {"reduction": reduction, "workspace": small()}
            expected = differentiate(fused, inputs, divergence, 0.5, **given)
            found = differentiate(fused, own_inputs, divergence, 0.5, **given, group=dist.group.WORLD)
            for name, each in found.items():
                part = expected[name][mine] if name in classes else expected[name]
                torch.testing.assert_close(each, part, equal_nan=True, msg=f"{divergence} {side} {name}")


def triton() -> None:
    """The Triton pass, which CUDA tensors take: the statistics of a rank's classes."""
    from lowtide.ops.distillation import softmax_torch, softmax_triton
    from lowtide.ops.distillation.part_stats import merge_sums
    from lowtide.ops.distillation.softmax_torch import HeadTile, Statistics
    from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LogitTransform

    torch.manual_seed(6)
    C, V = 5, 300
    products, biases = torch.randn(2, C, V) * 3, torch.randn(2, V)
    coef_C = torch.ones(C)
    parts = (slice(0, 190), slice(190, 191), slice(191, V))

    def heads(part: slice, caps: Any) -> list[HeadTile]:
        transforms = [LogitTransform(b[part], softcap=cap, temperature=1.5) for b, cap in zip(biases, caps)]
        return [HeadTile(u[:, part].clone(), each) for u, each in zip(products, transforms)]

    for beta, caps in product((0.0, 0.3, 1.0), ((0.0, 0.0), (4.0, 9.0))):
        known = {}
        for backend in (softmax_torch, softmax_triton):
            tiles, whole = [heads(part, caps) for part in parts], Statistics.of(torch.empty(C))
            found = [Statistics.of(torch.empty(C)) for _ in parts]
            common: dict[str, Any] = {"gradient_dtype": None, "pass_logits": 10**4, "part": True}
            for tile, stat in zip(tiles, found):
                run = backend.divergence_
                run(*tile, stat, coef_C, beta, take_sums=True, take_means=True, **common)
            vectors = zip(*(stat.vectors for stat in found))
            merge_sums(whole, Statistics(*(torch.stack(each) for each in vectors)), beta)
            if 0 < beta < 1:
                sums = [replace(whole, loss_N=torch.empty(C), mean_N=torch.empty(C)) for _ in parts]
                for tile, stat in zip(tiles, sums):
                    run(*tile, stat, coef_C, beta, take_sums=False, take_means=True, **common)
                for name in ("loss_N", "mean_N"):
                    getattr(whole, name).copy_(sum(getattr(stat, name) for stat in sums))
            known[backend] = whole
        alone = Statistics.of(torch.empty(C))
        softmax_torch.divergence_(
            *heads(slice(None), caps), alone, coef_C, beta, take_sums=True, take_means=True,
            gradient_dtype=None, pass_logits=10**4,
        )  # fmt: skip
        for found in known.values():
            for name, each, other in zip(alone.__slots__, alone.vectors, found.vectors):
                torch.testing.assert_close(other, each, rtol=2e-5, atol=2e-6, msg=f"{beta} {name}")


def near_teacher() -> None:
    """A student close to its teacher, in float32: the loss keeps the digits of one process."""
    torch.manual_seed(3)
    whole = make_inputs(N, 8, 96, 8, ignored=0)
    close = {"teacher_input": whole.student_input.detach(), "ignored": None}
    close["teacher_weight"] = whole.student_weight.detach() * (1 + 1e-4 * torch.randn(96, 8))
    whole = replace(whole, **close)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    classes = slice(rank * 96 // ranks, (rank + 1) * 96 // ranks)
    own = replace(
        whole,
        student_weight=whole.student_weight.detach()[classes],
        teacher_weight=whole.teacher_weight[classes],
    )
    for divergence in DIVERGENCES:
        exact = fused(whole.to(torch.float64), divergence, reduction="none").detach()
        alone = fused(whole, divergence, reduction="none").detach()
        found = fused(own, divergence, reduction="none", group=dist.group.WORLD).detach()
        assert exact.amax() < 1e-5
        allowed = 2 * (alone - exact).abs().amax() + 2e-8 * (not divergence.startswith("js"))
        assert (found - exact).abs().amax() <= allowed, divergence
