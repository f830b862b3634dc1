"""Measure the divergences of a student's and a teacher's head, of one shape.

The implementations are ours, torch's and Liger's. Each makes the teacher before anything is timed.
Errors are relative to the definition.

Legend: N tokens, D features, V classes, C tokens in a chunk.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from lowtide.distillation import forward_kl, jensen_shannon, reverse_kl
from lowtide.ops.distillation.divergences import losses
from lowtide.tools.bench.cases import IGNORE_INDEX, LossCase, Mode
from lowtide.tools.bench.measure import Row, rows
from lowtide.tools.bench.providers import Loss, Provider, cuda_module
from lowtide.tools.bench.truth import exact_mean, truth_dtype
from lowtide.tools.eager import eager_divergence
from lowtide.tools.units import GIB

WORKSPACES = {"lowtide": None, "lowtide-4GiB": 4 * GIB, "lowtide-1GiB": GIB}


class Divergence(NamedTuple):
    name: str
    beta: float  # 0 for forward KL, 1 for reverse KL, else that of Jensen-Shannon.
    compute: Callable[..., Tensor]


DIVERGENCES = (
    Divergence("forward_kl", 0.0, forward_kl),
    Divergence("reverse_kl", 1.0, reverse_kl),
    Divergence("jensen_shannon", 0.5, partial(jensen_shannon, beta=0.5)),
)


def teacher(case: LossCase) -> tuple[Tensor, Tensor]:
    """Return the teacher's hidden states and head, of the student's shapes."""
    input_ND, weight_VD, _ = replace(case, seed=1).inputs(requires_grad=False)
    return input_ND, weight_VD


def divergence_providers(divergence: Divergence) -> tuple[Provider, ...]:
    """Return lowtide with each workspace, then the others."""
    ours = (
        Provider(name, "lowtide", partial(_lowtide, divergence, workspace), workspace=workspace)
        for name, workspace in WORKSPACES.items()
    )
    return (
        *ours,
        Provider("eager", "torch", partial(_eager, divergence)),
        Provider("liger", "liger-kernel", partial(_liger, divergence)),
    )


def _lowtide(divergence: Divergence, workspace: int | None, case: LossCase) -> Loss:
    heads = teacher(case)

    def loss(input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        ignored_N = target_N == IGNORE_INDEX
        return divergence.compute(input_ND, weight_VD, *heads, ignored=ignored_N, workspace=workspace)

    return loss


def _eager(divergence: Divergence, case: LossCase) -> Loss:
    heads = teacher(case)

    def loss(input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        return eager_divergence(input_ND, weight_VD, *heads, divergence.beta, target_N == IGNORE_INDEX)

    return loss


def _liger(divergence: Divergence, case: LossCase) -> Loss:
    module = cuda_module("liger_kernel.transformers.functional", case.device)
    heads = teacher(case)

    def loss(input_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
        options = {"jsd_beta": divergence.beta, "ignore_index": IGNORE_INDEX}
        return module.liger_fused_linear_jsd(input_ND, weight_VD, *heads, target_N, **options)

    return loss


def divergence_rows(case: LossCase, divergence: Divergence, providers: Iterable[Provider]) -> Iterator[Row]:
    named = replace(case, name=f"{case.name}-{divergence.name}", heads=2)
    return rows(named, providers, Mode.STEP, truth=partial(exact_divergence, case, divergence.beta))


def exact_divergence(
    case: LossCase, beta: float, input_ND: Tensor, weight_VD: Tensor, target_N: Tensor
) -> tuple[Tensor, ...]:
    """Return (loss, dX, dW) of the rows that are not ignored, by chunks in `truth_dtype`."""
    wide = truth_dtype(case.tokens, case.features, case.classes, case.dtype)
    t_ND, t_VD = (each.to(wide) for each in teacher(case))

    def of_rows(x_CD: Tensor, w_VD: Tensor, target_C: Tensor, t_CD: Tensor) -> Tensor:
        s_CV, t_CV = (F.linear(*head).log_softmax(1) for head in ((x_CD, w_VD), (t_CD, t_VD)))
        return losses(s_CV, t_CV, beta)

    return exact_mean(of_rows, input_ND, weight_VD, target_N, t_ND)
