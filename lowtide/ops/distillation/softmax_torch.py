"""Compute row statistics and the gradient from a tile of both heads' logits, in plain torch.

The gradient is written over the student's product. softmax_triton.py has the same function in
Triton; divergences.py has the formulas.

A head's logits z come from its product u = X W^T by a LogitTransform with temperature T:
z = (u + bias) / T, or with a soft cap c z = c/T tanh((u + bias) / c).

Shapes: C rows and B columns of one tile, whose statistics are those of the tile's classes. Tensors
named _cb have c of the C rows, which are taken at a time, and all B columns.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.elementwise import add_row_sum, exp_
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ByRow, LogitTransform


class HeadTile(NamedTuple):
    """Hold a tile of one head: a product, and the transform that turns it into logits."""

    product_CB: Tensor
    transform: LogitTransform  # with the bias of the tile's classes


@dataclass(frozen=True, slots=True)
class Statistics(ByRow):
    """Hold the row statistics, in the notation of divergences.py."""

    loss_N: Tensor
    student_max_N: Tensor
    student_sum_N: Tensor  # S of divergences.py
    teacher_max_N: Tensor
    teacher_sum_N: Tensor
    log_ratio_N: Tensor  # d
    mean_N: Tensor  # M of a KL divergence, K of Jensen-Shannon

    @classmethod
    def of(cls, loss_N: Tensor) -> "Statistics":
        """Return memory for the statistics, in which loss_N holds the losses."""
        return cls(loss_N, *(torch.empty_like(loss_N) for _ in fields(cls)[1:]))


def divergence_(
    student: HeadTile,
    teacher: HeadTile,
    statistics: Statistics,
    coef_C: Tensor,
    beta: float,
    *,
    take_sums: bool,
    take_means: bool,
    gradient_dtype: torch.dtype | None,  # None: statistics alone
    pass_logits: int,
    part: bool = False,
    bias_sum_B: Tensor | None = None,
) -> Tensor | None:  # [C, B]
    """Compute the statistics, and write the gradient over the student's product.

    `take_sums` computes the maxima and sums of both heads and their log-ratio d. `take_means`
    computes the means and the losses; for Jensen-Shannon it needs maxima and sums of all classes.
    What is not computed is read from `statistics`. Each row's gradient is multiplied by its number
    of coef_C. About `pass_logits` logits of each head are taken at a time. `part` says that other
    ranks have the other classes of the rows; then the products are not overwritten. The sum of the
    gradient's rows, which are not rounded yet, is added to `bias_sum_B`, if given.
    """
    C, B = student.product_CB.shape
    # The gradient lies in the memory of the products. Its numbers are as wide or half as wide.
    g_CB = None if gradient_dtype is None else student.product_CB.view(gradient_dtype)[:, :B]
    rounds = g_CB is not None and g_CB.dtype != coef_C.dtype
    step = max(1, pass_logits // B)
    for start in range(0, C, step):
        rows = slice(start, start + step)
        stat = statistics[rows]
        s_cb, slope_cb = _logits_(student, rows, g_CB is not None, keep=part)
        t_cb, _ = _logits_(teacher, rows, keep=part)
        if take_sums:
            for z_cb, max_c in ((s_cb, stat.student_max_N), (t_cb, stat.teacher_max_N)):
                torch.amax(z_cb, 1, out=max_c)
                if part:  # a bias of -inf may exclude all of its classes
                    max_c.clamp_(min=torch.finfo(max_c.dtype).min)
        gradient_cb = _divergence(s_cb, t_cb, stat, beta, take_sums, take_means)
        if g_CB is not None:
            if slope_cb is not None:
                gradient_cb.mul_(slope_cb)
            gradient_cb.mul_(coef_C[rows, None])
            if rounds:
                add_row_sum(bias_sum_B, gradient_cb)
            g_CB[rows] = gradient_cb
        del gradient_cb, slope_cb  # free them before the next ones are made
    if not rounds:
        add_row_sum(bias_sum_B, g_CB)
    return g_CB


def _logits_(
    head: HeadTile, rows: slice, sloped: bool = False, *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return z and, if `sloped`, the slope of a soft cap.

    z overwrites u, or with `keep` a copy of u.
    """
    z_cb = head.product_CB[rows]
    if keep:
        z_cb = z_cb.clone()
    if head.transform.bias_V is not None:
        z_cb.add_(head.transform.bias_V)
    return head.transform.apply(z_cb, in_place=True, sloped=sloped)


def _divergence(
    s_cb: Tensor, t_cb: Tensor, stat: Statistics, beta: float, take_sums: bool, take_means: bool
) -> Tensor:
    """Compute the statistics, and return the gradient with respect to the student's logits."""
    student_cb, teacher_cb = s_cb - stat.student_max_N[:, None], t_cb - stat.teacher_max_N[:, None]
    ahead_cb = student_cb - teacher_cb if beta else teacher_cb - student_cb
    # A class adds 0 if the head that weights its term excludes it (for Jensen-Shannon, if both do).
    weighs_cb = (
        student_cb if beta == 1 else teacher_cb if beta == 0 else torch.maximum(student_cb, teacher_cb)
    )
    ahead_cb.masked_fill_(weighs_cb == -torch.inf, 0)
    del weighs_cb
    exp_(student_cb), exp_(teacher_cb)
    if take_sums:
        torch.sum(student_cb, 1, out=stat.student_sum_N)
        torch.sum(teacher_cb, 1, out=stat.teacher_sum_N)
        # Sum the differences of classes: if the two sums are close, their difference loses digits.
        excess_c = (student_cb - teacher_cb).sum(1).div_(stat.teacher_sum_N)
        log_ratio_c = (stat.student_sum_N / stat.teacher_sum_N).log_()
        torch.where(excess_c.abs() < 0.25, excess_c.log1p(), log_ratio_c, out=stat.log_ratio_N)
    student_cb.div_(stat.student_sum_N[:, None]), teacher_cb.div_(stat.teacher_sum_N[:, None])
    if 0 < beta < 1:
        return _jensen_shannon(student_cb, teacher_cb, ahead_cb, stat, beta, take_means)
    if take_means:
        torch.sum(ahead_cb * (student_cb if beta else teacher_cb), 1, out=stat.mean_N)
        torch.add(stat.mean_N, stat.log_ratio_N, alpha=-1 if beta else 1, out=stat.loss_N)
    if beta == 0:
        return student_cb.sub_(teacher_cb)
    return ahead_cb.sub_(stat.mean_N[:, None]).mul_(student_cb)


def _jensen_shannon(
    student_cb: Tensor,
    teacher_cb: Tensor,
    ahead_cb: Tensor,  # a_s - a_t
    stat: Statistics,
    beta: float,
    take_means: bool,
) -> Tensor:
    """Do the same as `_divergence` for Jensen-Shannon; the tensors passed are overwritten."""
    gap_cb = ahead_cb.neg_().add_(stat.log_ratio_N[:, None])
    gap_cb.nan_to_num_(0)  # an infinite gap becomes the largest number, and 0 times it is 0
    # near = max(s, t) - m, as -log1p of a number that is small where s and t are close.
    share_cb = (gap_cb >= 0).to(gap_cb.dtype).mul_(1 - 2 * beta).add_(beta)
    near_cb = gap_cb.abs().neg_().expm1_().mul_(share_cb).log1p_().neg_()
    del share_cb
    teacher_term_cb = teacher_cb.mul_(gap_cb.clamp(max=0).add_(near_cb))
    s_gap_cb = near_cb.sub_(gap_cb.clamp_(min=0))
    if take_means:
        student_term_cb = student_cb * s_gap_cb
        torch.sum(student_term_cb, 1, out=stat.mean_N)
        # Add both heads' terms of a class first, since their sums cancel at first order.
        terms_cb = teacher_term_cb.mul_(beta).add_(student_term_cb, alpha=1 - beta)
        torch.sum(terms_cb, 1, out=stat.loss_N)
    return s_gap_cb.sub_(stat.mean_N[:, None]).mul_(student_cb).mul_(1 - beta)
