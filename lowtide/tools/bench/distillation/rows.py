"""Measure every provider on one divergence; errors are relative to the definition.

Legend: N tokens, D features, V classes, C tokens in a chunk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from lowtide.ops.distillation.divergences import losses
from lowtide.tools.bench.cases import LossCase, Mode
from lowtide.tools.bench.distillation.providers import Divergence, teacher
from lowtide.tools.bench.measure import Row, rows
from lowtide.tools.bench.providers import Provider
from lowtide.tools.bench.truth import exact_mean, truth_dtype


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
