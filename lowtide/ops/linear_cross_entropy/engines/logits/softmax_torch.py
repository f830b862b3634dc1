"""The pass over a tile of logits, in plain torch: row statistics, then, in place, the gradient of the logits.

`softmax_triton.py` has the same function in one Triton kernel. The product gives u; the logits are

    z = s u,  or with a soft cap  z = c tanh(s u / c),  whose slope is  dz/du / s = 1 / cosh^2(s u / c)

With class weights w, smoothing e, class probabilities y, z-loss l and the row's upstream gradient, each row i
with target t contributes

    loss      = (1 - e) w_t (lse - z_t) + e/V sum_v w_v (lse - z_v) + l lse^2
    gradient  = slope_v (p_v (pull + tilt (z_v - max)) - hit [v = t] - spread w_v - soft w_v y_v)
    where p_v = exp(z_v - max) / sum,   hit = upstream (1 - e) w_t,   spread = upstream e/V,
          pull = hit + spread sum_v w_v + soft sum_v w_v y_v + lse_pull lse,   lse_pull = upstream 2 l

Class probabilities, smoothed to y = (1 - e) y + e/V, make sum_v y_v w_v (lse - z_v) of the first two terms,
and the gradient takes soft = upstream in place of hit and spread. tilt is what an entropy's gradient adds.
That is the gradient for u_v but for the factor s, which is common to all and applied to the gradients of
input and weight; the gradient of s itself is the sum over v of this one times u_v ("moment").

Shapes: N tokens, V classes; C rows and B columns of one tile (B = V wherever statistics are taken).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from lowtide.core.soft_cap import slope_of_tanh

# Rows are taken a few at a time on the CPU, so that the passes over them stay in the cache of each thread.
CACHE_BYTES = 1 << 20  # decision 0026

Own = TypeVar("Own", bound="_ByRow")


class _ByRow:
    """Vectors of one number a row; what has no part in a call is None."""

    def each(self: Own, change: Callable[[Tensor], Tensor]) -> Own:
        values = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return type(self)(*(None if value is None else change(value) for value in values))

    def __getitem__(self: Own, rows: slice) -> Own:
        return self.each(lambda vector: vector[rows])


@dataclass(frozen=True, slots=True)
class Terms(_ByRow):
    """What the gradient of each row is made of; all 0 for rows that are ignored."""

    target_N: Tensor
    ignored_N: Tensor
    pull_N: Tensor
    hit_N: Tensor
    spread_N: Tensor = None  # with label smoothing
    soft_N: Tensor = None  # with class probabilities
    lse_pull_N: Tensor = None  # with a z-loss
    tilt_N: Tensor = None  # with an upstream gradient of the entropy

    def largest(self) -> Tensor:
        """About the largest magnitude that the gradient of a logit may have, 0-d; 0 for no rows."""
        if self.pull_N.shape[0] == 0:
            return self.pull_N.sum()
        # Two are multiplied by what is not known yet: a log-sum-exp, and the sum of a row's probabilities.
        room = {"lse_pull_N": 1024, "soft_N": 64}
        found = []
        for field in fields(self):
            vector = getattr(self, field.name)
            if vector is not None and vector.is_floating_point():
                found.append(vector.abs().amax() * room.get(field.name, 1))
        return torch.stack(found).amax()

    def __mul__(self, factor: Tensor) -> "Terms":
        return self.each(lambda each: each * factor if each.is_floating_point() else each)


@dataclass(frozen=True, slots=True)
class Statistics(_ByRow):
    max_N: Tensor
    sum_N: Tensor  # of exp(z - max)
    gap_N: Tensor = None  # lse - z_t
    smooth_N: Tensor = None  # sum_v w_v (lse - z_v)
    mass_N: Tensor = None  # sum_v w_v y_v
    cross_N: Tensor = None  # sum_v w_v y_v (lse - z_v)
    mean_N: Tensor = None  # sum_v p_v (z_v - max)
    argmax_N: Tensor = None
    moment_N: Tensor = None  # sum_v gradient_v u_v


@dataclass(frozen=True, slots=True)
class Columns:
    """Of a tile: where it lies among the classes, what belongs to each, and the way from u to z."""

    first_class: int
    bias_B: Tensor | None
    class_weight_B: Tensor | None
    soft_CB: Tensor | None  # the class probabilities, in any dtype
    smoothing: tuple[float, float]  # y becomes y smoothing[0] + smoothing[1]
    scale: Tensor | None  # 0-d
    softcap: float  # 0 for none

    def __getitem__(self, rows: slice) -> "Columns":
        soft_CB = None if self.soft_CB is None else self.soft_CB[rows]
        return replace(self, soft_CB=soft_CB)


def softmax_gradient_(
    logits_CB: Tensor,
    terms: Terms,
    statistics: Statistics,
    columns: Columns,
    *,
    take_statistics: bool,
    gradient_dtype: torch.dtype | None,  # None: statistics alone
) -> Tensor | None:  # [C, B]
    C, B = logits_CB.shape
    cached = CACHE_BYTES * torch.get_num_threads() // (B * logits_CB.element_size())
    step = max(1, C if logits_CB.is_cuda else cached)
    for start in range(0, C, step):
        rows = slice(start, start + step)
        row, stat, column = terms[rows], statistics[rows], columns[rows]
        bent = gradient_dtype is not None
        z_cb, raw_cb, slope_cb = _logits_(logits_CB[rows], column, stat.moment_N is not None, bent)
        if take_statistics:
            torch.amax(z_cb, 1, out=stat.max_N)
            if stat.argmax_N is not None:
                torch.argmax(z_cb, 1, out=stat.argmax_N)
            if stat.gap_N is not None:  # z_t - max, until the sum is known
                torch.sub(z_cb.gather(1, row.target_N[:, None])[:, 0], stat.max_N, out=stat.gap_N)
        shift_cb = z_cb.sub_(stat.max_N[:, None])
        soft_cb = None
        if column.soft_CB is not None:
            soft_cb = column.soft_CB.to(z_cb.dtype) * column.smoothing[0] + column.smoothing[1]
            soft_cb = soft_cb if column.class_weight_B is None else soft_cb * column.class_weight_B
        if take_statistics:
            _take_sums_of_shifts(shift_cb, stat, soft_cb, column.class_weight_B)
        tilted = row.tilt_N is not None or (take_statistics and stat.mean_N is not None)
        exp_cb = shift_cb.exp() if tilted else shift_cb.exp_()
        if take_statistics:
            _take_statistics(exp_cb, shift_cb, stat, column.class_weight_B)
        if gradient_dtype is None:
            continue
        grad_cb = _exponentials_to_gradient_(exp_cb, shift_cb, row, stat, column, soft_cb)
        if slope_cb is not None:
            grad_cb.mul_(slope_cb)
        if stat.moment_N is not None:
            torch.sum(grad_cb * raw_cb, 1, out=stat.moment_N)
        if tilted:
            logits_CB[rows] = grad_cb
    return None if gradient_dtype is None else logits_CB.to(gradient_dtype)


def _logits_(
    u_cb: Tensor, columns: Columns, keep: bool, bent: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return z in the place of u; u, if it is to be kept; the slope, if it is asked for (`bent`) and is not 1
    everywhere."""
    if columns.bias_B is not None:
        u_cb.add_(columns.bias_B)
    raw_cb = u_cb.clone() if keep else None
    z_cb = u_cb if columns.scale is None else u_cb.mul_(columns.scale)
    if not columns.softcap:
        return z_cb, raw_cb, None
    z_cb.div_(columns.softcap)
    slope_cb = slope_of_tanh(z_cb) if bent else None
    return z_cb.tanh_().mul_(columns.softcap), raw_cb, slope_cb


def _take_sums_of_shifts(
    shift_cb: Tensor, stat: Statistics, soft_cb: Tensor | None, class_weight_B: Tensor | None
) -> None:
    """Of z - max, weighted; what is missing is the log of the sum, which is not known yet."""
    if stat.smooth_N is not None:
        stat.smooth_N.copy_(shift_cb.sum(1) if class_weight_B is None else shift_cb @ class_weight_B)
    if soft_cb is not None:
        torch.sum(soft_cb, 1, out=stat.mass_N)
        torch.sum(soft_cb * shift_cb, 1, out=stat.cross_N)


def _take_statistics(
    exp_cb: Tensor, shift_cb: Tensor, stat: Statistics, class_weight_B: Tensor | None
) -> None:
    torch.sum(exp_cb, 1, out=stat.sum_N)
    log_sum_c = stat.sum_N.log()
    if stat.gap_N is not None:
        torch.sub(log_sum_c, stat.gap_N, out=stat.gap_N)
    if stat.smooth_N is not None:
        total_weight = exp_cb.shape[1] if class_weight_B is None else class_weight_B.sum()
        torch.sub(log_sum_c * total_weight, stat.smooth_N, out=stat.smooth_N)
    if stat.cross_N is not None:
        torch.sub(log_sum_c * stat.mass_N, stat.cross_N, out=stat.cross_N)
    if stat.mean_N is not None:
        # An excluded class (z = -inf) has probability 0 and adds 0, not 0 times infinity.
        shift_cb.masked_fill_(shift_cb == -torch.inf, 0)
        torch.div((exp_cb * shift_cb).sum(1), stat.sum_N, out=stat.mean_N)


def _exponentials_to_gradient_(
    exp_cb: Tensor, shift_cb: Tensor, row: Terms, stat: Statistics, columns: Columns, soft_cb: Tensor | None
) -> Tensor:
    pull_c = row.pull_N
    if row.soft_N is not None:
        pull_c = pull_c + row.soft_N * stat.mass_N
    if row.lse_pull_N is not None:
        logsumexp_c = stat.max_N + stat.sum_N.log()
        pull_c = pull_c + row.lse_pull_N * logsumexp_c.masked_fill_(row.ignored_N, 0)
    grad_cb = exp_cb
    if row.tilt_N is None:
        grad_cb.mul_((pull_c / stat.sum_N)[:, None])
    else:
        shift_cb.masked_fill_(shift_cb == -torch.inf, 0)
        shift_cb.mul_((row.tilt_N / stat.sum_N)[:, None]).add_((pull_c / stat.sum_N)[:, None])
        grad_cb.mul_(shift_cb)
    if row.spread_N is not None:
        spread_c1, class_weight_B = row.spread_N[:, None], columns.class_weight_B
        grad_cb.sub_(spread_c1) if class_weight_B is None else grad_cb.addcmul_(
            spread_c1, class_weight_B, value=-1
        )
    if row.soft_N is not None:
        return grad_cb.addcmul_(row.soft_N[:, None], soft_cb, value=-1)
    # The one-hot is subtracted before any rounding: p - 1 would lose its digits where p is near 1.
    column_c = row.target_N - columns.first_class
    inside_c = (column_c >= 0) & (column_c < grad_cb.shape[1])
    column_c1 = torch.where(inside_c, column_c, 0)[:, None]
    hit_c = torch.where(inside_c, row.hit_N, 0)
    return grad_cb.scatter_(1, column_c1, grad_cb.gather(1, column_c1) - hit_c[:, None])
