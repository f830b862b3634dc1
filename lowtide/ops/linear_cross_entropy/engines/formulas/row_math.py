"""Define the arithmetic of a row: from logits to its loss, and to the coefficients of its gradient.

All engines share these formulas; row_math_triton.py has those that kernels need in Triton.

Let u be a row of the product of input and weight, plus the bias. With the logit scale s and the
soft cap c, the logits are

    z = s u,  or with a soft cap  z = c tanh(s u / c),  slope  dz/du / s = 1 / cosh^2(s u / c)

Let w be the class weights, e the label smoothing, y the class probabilities, l the weight of the
z-loss, and upstream the row's upstream gradient. max, sum and lse are the row's largest logit, its
sum of exp(z_v - max), and its log-sum-exp. A row with target t contributes

    loss      = (1 - e) w_t (lse - z_t) + e/V sum_v w_v (lse - z_v) + l lse^2
    gradient  = slope_v (p_v (softmax_coef + entropy_coef (z_v - max))
                         - target_coef [v = t] - smoothing_coef w_v - soft_target_coef w_v y_v)
    where p_v            = exp(z_v - max) / sum
          target_coef    = upstream (1 - e) w_t
          smoothing_coef = upstream e/V
          lse_coef       = upstream 2 l
          softmax_coef   = target_coef + smoothing_coef sum_v w_v
                           + soft_target_coef sum_v w_v y_v + lse_coef lse

A row weight multiplies the row's loss and its upstream gradient. entropy_coef comes from the
upstream gradient of an entropy. In `RowCoefs`, softmax_coef lacks its last two terms, which depend
on the row's statistics; `whole_softmax_coef` adds them.

Class probabilities are smoothed first: (1 - e) y + e/V takes the place of y. With them the first
two terms of the loss become sum_v y_v w_v (lse - z_v), and soft_target_coef = upstream replaces
target_coef and smoothing_coef.

The gradient above is that of u_v without the factor s. All rows share s, so it is applied to the
gradients of input and weight instead. A row's share of the gradient of s is the sum over v of the
gradient above times u_v (`grad_dot_logit_N`).

Shapes: N tokens, V classes; C rows and B columns of one tile.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from lowtide.core.elementwise import slope_of_tanh

# If a row's sum of exponentials is larger, some logit is about 40 above the reference, which is
# then replaced. e^40 and e^-40 are well inside bfloat16's range.
LARGEST_SUM = 1e17

Own = TypeVar("Own", bound="ByRow")


class ByRow:
    """Hold vectors of one number per row; a vector that has no part in a call is None."""

    __match_args__: ClassVar[tuple[str, ...]]  # the names of the fields; quicker than dataclasses.fields

    def each(self: Own, change: Callable[[Tensor], Tensor]) -> Own:
        return type(self)(*(None if value is None else change(value) for value in self.vectors))

    @property
    def vectors(self) -> tuple[Tensor | None, ...]:
        """Return the vectors in the order of the fields."""
        return tuple(getattr(self, name) for name in self.__match_args__)

    def __getitem__(self: Own, rows: slice) -> Own:
        if rows == slice(0, getattr(self, self.__match_args__[0]).shape[0]):
            return self  # a view of each vector takes the host 2 microseconds
        return self.each(lambda vector: vector[rows])


@dataclass(frozen=True, slots=True)
class RowCoefs(ByRow):
    """Hold the coefficients of each row's gradient; all are 0 for ignored rows."""

    target_N: Tensor
    ignored_N: Tensor
    softmax_coef_N: Tensor
    target_coef_N: Tensor
    smoothing_coef_N: Tensor = None  # with label smoothing
    soft_target_coef_N: Tensor = None  # with class probabilities
    lse_coef_N: Tensor = None  # with a z-loss
    entropy_coef_N: Tensor = None  # with an upstream gradient of the entropy

    def largest(self) -> Tensor:
        """Return a rough bound of the magnitude of a logit's gradient, 0-d; 0 for no rows."""
        if self.softmax_coef_N.shape[0] == 0:
            return self.softmax_coef_N.sum()
        # Guesses of what these coefficients are multiplied by, which is not known yet: the row's
        # log-sum-exp, and the sum of its class probabilities.
        room = {"lse_coef_N": 1024, "soft_target_coef_N": 64}
        bounds = []
        for field in fields(self):
            vector = getattr(self, field.name)
            if vector is not None and vector.is_floating_point():
                largest = torch.linalg.vector_norm(vector, torch.inf)
                bounds.append(largest * room[field.name] if field.name in room else largest)
        return torch.stack(bounds).amax()

    def __mul__(self, factor: Tensor) -> "RowCoefs":
        return self.each(lambda each: each * factor if each.is_floating_point() else each)


@dataclass(frozen=True, slots=True)
class _Stats(ByRow):
    """Hold the statistics of each row that both kinds have."""

    max_N: Tensor
    sum_N: Tensor
    nll_N: Tensor = None  # lse - z_t
    smooth_nll_N: Tensor = None  # sum_v w_v (lse - z_v)
    soft_mass_N: Tensor = None  # sum_v w_v y_v
    soft_nll_N: Tensor = None  # sum_v w_v y_v (lse - z_v)
    mean_N: Tensor = None  # sum_v p_v (z_v - max)
    argmax_N: Tensor = None
    grad_dot_logit_N: Tensor = None  # sum_v gradient_v u_v


@dataclass(frozen=True, slots=True)
class SoftmaxStats(_Stats):
    """Hold the statistics of a softmax: max_N is the largest z, sum_N = sum_v exp(z_v - max)."""

    @property
    def logsumexp_N(self) -> Tensor:
        return self.sum_N.log() + self.max_N

    @property
    def entropy_N(self) -> Tensor:
        return self.sum_N.log() - self.mean_N


@dataclass(frozen=True, slots=True)
class ExcludedTargetStats(_Stats):
    """Hold the statistics of the exponentials engines, whose sum leaves the target out.

    max_N is a reference r near the largest z, and sum_N = sum over v != t of exp(z_v - r). If a
    confident token's target were in the sum, the other terms would lose their digits.
    """

    target_logit_N: Tensor = None  # z_t; backward reads it only if classes are on several ranks

    @property
    def logsumexp_N(self) -> Tensor:
        return excluded_logsumexp(self, self.target_logit_N)

    @property
    def entropy_N(self) -> Tensor:
        exp_N = (self.target_logit_N - self.max_N).exp()
        return (exp_N + self.sum_N).log() - self.mean_N


RowStats = SoftmaxStats | ExcludedTargetStats
"""The statistics of each row; sum_N includes the target in SoftmaxStats alone."""


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """Turn products into logits by a bias, a scale, a soft cap and a temperature."""

    bias_V: Tensor | None = None
    scale: Tensor | None = None  # 0-d
    softcap: float = 0.0  # 0 for none
    temperature: float = 1.0  # divides the logits after the cap; the loss has a scale instead

    @property
    def is_identity(self) -> bool:
        return self.bias_V is None and self.scale is None and not self.softcap and self.temperature == 1

    @property
    def largest(self) -> float:
        """Return a bound that no capped logit exceeds; 0 without a cap."""
        return self.softcap / self.temperature

    def of(self, classes: slice) -> "LogitTransform":
        """Return the transform of a block of classes."""
        return self if self.bias_V is None else replace(self, bias_V=self.bias_V[classes])

    def apply(self, u: Tensor, *, in_place: bool, sloped: bool) -> tuple[Tensor, Tensor | None]:
        """Return the logits z of u, and if `sloped` their slope, or None if it is 1.

        u includes the bias. The slope is dz/du without the factors of scale and temperature.
        """
        out = u if in_place else None
        z = u if self.scale is None else torch.mul(u, self.scale, out=out)
        if not self.softcap:
            return z if self.temperature == 1 else torch.div(z, self.temperature, out=out), None
        z = torch.div(z, self.softcap, out=out)
        slope = slope_of_tanh(z) if sloped else None
        return z.tanh_().mul_(self.largest), slope


@dataclass(frozen=True, slots=True)
class TileColumns:
    """Hold the place of a tile among the classes, and what belongs to each of its classes."""

    first_class: int
    transform: LogitTransform  # with the scale, soft cap and bias of the tile's classes
    class_weight_B: Tensor | None = None
    soft_CB: Tensor | None = None  # the class probabilities, in any dtype
    smoothing: tuple[float, float] = (1.0, 0.0)  # y becomes y smoothing[0] + smoothing[1]

    def __getitem__(self, rows: slice) -> "TileColumns":
        soft_CB = None if self.soft_CB is None else self.soft_CB[rows]
        return replace(self, soft_CB=soft_CB)


def whole_softmax_coef(coefs: RowCoefs, stats: RowStats, find_logsumexp: Callable[[], Tensor]) -> Tensor:
    """Return softmax_coef of each row, with the terms that depend on the row's statistics."""
    softmax_coef_C = coefs.softmax_coef_N
    if coefs.soft_target_coef_N is not None:
        softmax_coef_C = softmax_coef_C + coefs.soft_target_coef_N * stats.soft_mass_N
    if coefs.lse_coef_N is not None:
        softmax_coef_C = softmax_coef_C + coefs.lse_coef_N * find_logsumexp().masked_fill_(coefs.ignored_N, 0)
    return softmax_coef_C


def excluded_coefs(
    coefs: RowCoefs, stats: ExcludedTargetStats, logit_C: Tensor, *, take_nll: bool
) -> tuple[Tensor, Tensor]:
    """Return the coefficients c and h of G = c E + h [v = t] (exponentials/engine.py).

    With `take_nll`, write lse - z_t to `stats.nll_N`, too.
    """
    above_C = logit_C - stats.max_N
    exp_C = above_C.exp()
    total_C = exp_C + stats.sum_N
    if take_nll:
        target_nll(above_C, stats.sum_N, total_C, out=stats.nll_N)
    softmax_coef_C = whole_softmax_coef(coefs, stats, lambda: excluded_logsumexp(stats, logit_C))
    # h times the total, without a difference of two numbers near 1
    rest_C = (softmax_coef_C - coefs.target_coef_N) * exp_C - coefs.target_coef_N * stats.sum_N
    return softmax_coef_C / total_C, rest_C / total_C


def target_nll(above_C: Tensor, others_C: Tensor, total_C: Tensor, *, out: Tensor) -> None:
    """Write lse - z_t of each row; `above` is z_t - max, and `total` the sum of exponentials.

    `others` is the sum without the target's exponential. If z_t is the maximum, this exponential is
    1, and a total near 1 has lost the digits of the others.
    """
    torch.where(above_C == 0, others_C.log1p(), total_C.log() - above_C, out=out)


def excluded_logsumexp(stats: ExcludedTargetStats, logit_C: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, from statistics without the target and its logit."""
    return stats.max_N + ((logit_C - stats.max_N).exp() + stats.sum_N).log()
