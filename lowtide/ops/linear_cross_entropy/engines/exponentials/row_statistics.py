"""Compute the row statistics of both exponentials engines: the log-sum-exp and the entropy.

exponentials/engine.py has the formulas; row_coefficients.py computes the coefficients of the
gradient.

Shapes: N tokens, D features, V classes; C tokens of a chunk.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from lowtide.core.soft_cap import slope_of_tanh
from lowtide.ops.linear_cross_entropy.engines.engine import Stream
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import Statistics

if TYPE_CHECKING:  # the module imports Triton
    from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm

# A larger sum means a logit about 40 above the reference. e^40 and e^-40 are well inside bfloat16's
# range.
LARGEST_SUM = 1e17


class ExponentialRows(Stream):
    """Compute the values of each row from statistics that exclude the target from the sum.

    The statistics are max_N = r, sum_N = S, gap_N = lse - z_t and mean_N = sum_v p_v (z_v - r).
    """

    linear: "list[LinearTerm]"
    target_logit_N: Tensor
    scale_N: Tensor  # c in the formulas
    hit_N: Tensor  # h in the formulas

    def bend_(self, raw_C: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return z and its slope; raw_C becomes u in place, because the bias is added to it."""
        if self.bias_V is not None:
            raw_C += self.bias_V[target_C]
        logit_C = raw_C if self.scale is None else raw_C * self.scale
        softcap = self.plan.options.softcap
        if not softcap:
            return logit_C, None
        ratio_C = logit_C / softcap
        return ratio_C.tanh() * softcap, slope_of_tanh(ratio_C)

    def logsumexp_N(self, statistics: Statistics) -> Tensor:
        return logsumexp(statistics, self.target_logit_N)

    def entropy_N(self, statistics: Statistics) -> Tensor:
        exp_N = (self.target_logit_N - statistics.max_N).exp()
        return (exp_N + statistics.sum_N).log() - statistics.mean_N

    def raw_smooth(self, chunks: list[Tensor]) -> Tensor:  # [C]: sum_v w_v u_v
        raw_C = total(each.sum_of_logits(x_CD) for each, x_CD in zip(self.linear, chunks))
        if self.bias_V is not None:
            bias_V = self.bias_V if self.class_weight_V is None else self.bias_V * self.class_weight_V
            raw_C = raw_C + bias_V.sum()
        return raw_C


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the tensors, accumulated in the memory of the first."""
    total, *others = tensors
    for each in others:
        total += each
    return total


def logsumexp(stat: Statistics, logit_C: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, from its statistics and the target's logit."""
    return stat.max_N + ((logit_C - stat.max_N).exp() + stat.sum_N).log()
