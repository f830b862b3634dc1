"""Measure every provider on one divergence; errors are relative to the definition.

Legend: N tokens, D features, V classes, C tokens in a chunk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.ops.distillation.divergences import losses
from lowtide.tools.bench.cases import IGNORE_INDEX, LossCase, Mode
from lowtide.tools.bench.distillation.providers import Divergence, teacher
from lowtide.tools.bench.measure import Row, rows
from lowtide.tools.bench.providers import Provider
from lowtide.tools.bench.truth import TRUTH_CHUNK, truth_dtype


def divergence_rows(case: LossCase, divergence: Divergence, providers: Iterable[Provider]) -> Iterator[Row]:
    named = replace(case, name=f"{case.name}-{divergence.name}", heads=2)
    return rows(named, providers, Mode.STEP, truth=partial(exact_divergence, case, divergence.beta))


def exact_divergence(
    case: LossCase, beta: float, input_ND: Tensor, weight_VD: Tensor, target_N: Tensor
) -> tuple[Tensor, ...]:
    """Return (loss, dX, dW) of the rows that are not ignored, by chunks in `truth_dtype`."""
    wide = truth_dtype(case.tokens, case.features, case.classes, case.dtype)
    x_ND, w_VD = (each.detach().to(wide).requires_grad_() for each in (input_ND, weight_VD))
    t_ND, t_VD = (each.to(wide) for each in teacher(case))
    counted_N = target_N != IGNORE_INDEX
    loss = torch.zeros((), dtype=torch.float64, device=input_ND.device)
    for x_CD, t_CD, counted_C in zip(*(each.split(TRUTH_CHUNK) for each in (x_ND, t_ND, counted_N))):
        s_CV, t_CV = (F.linear(*head).log_softmax(1) for head in ((x_CD, w_VD), (t_CD, t_VD)))
        part = (losses(s_CV, t_CV, beta) * counted_C).sum() / counted_N.sum()
        part.backward()
        loss += part.detach()
    assert x_ND.grad is not None
    assert w_VD.grad is not None
    return loss, x_ND.grad, w_VD.grad
