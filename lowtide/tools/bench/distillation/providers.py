"""List the divergences, and every implementation that is measured on one of them.

They are ours, torch's and Liger's. Each makes the teacher before anything is timed.

Legend: N tokens, D features, V classes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from lowtide.distillation import forward_kl, jensen_shannon, reverse_kl
from lowtide.tools.bench.cases import IGNORE_INDEX, LossCase
from lowtide.tools.bench.providers import Loss, Provider, cuda_module
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
