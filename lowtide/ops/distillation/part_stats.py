"""Merge the row statistics of the parts of both heads' classes that the ranks have.

As within one part (divergences.py) the digits of a small divergence stay: differences of maxima
enter where the heads' parts agree, never differences of sums.

Shapes: C rows of a chunk, P parts of the classes.
"""

import torch
from torch import Tensor

from lowtide.ops.distillation.softmax_torch import Statistics


def merge_sums(out: Statistics, parts: Statistics, beta: float) -> None:
    """Write to `out` the statistics of all classes, from those of the parts, [P, C] each.

    With m the largest maximum m_p of a head, r_p = exp(m_p - m) and S = sum_p r_p S_p; for KL(own ‖
    other), whose mean M weights by own, and x_p = (log r_own - log r_other)_p,

        S_s - S_t = sum_p r_t S_t (exp(x_p + d_p) - 1), where own is the student
        M         = sum_p (r S)_own,p (M_p + x_p) / S_own

    Parts have `d` in log_ratio_N and M in mean_N. The losses are those of a KL divergence; for
    Jensen-Shannon they and the means follow from what is merged here.
    """
    student = _merged(parts.student_max_N, parts.student_sum_N, out.student_max_N, out.student_sum_N)
    teacher = _merged(parts.teacher_max_N, parts.teacher_sum_N, out.teacher_max_N, out.teacher_sum_N)
    (student_shift_PC, student_sum_PC), (teacher_shift_PC, teacher_sum_PC) = student, teacher
    ahead_PC = student_shift_PC - teacher_shift_PC
    distance_PC = ahead_PC + parts.log_ratio_N
    near_PC = (distance_PC.abs() < 0.25) & (student_sum_PC > 0) & (teacher_sum_PC > 0)
    excess_PC = torch.where(near_PC, teacher_sum_PC * distance_PC.expm1(), student_sum_PC - teacher_sum_PC)
    excess_C = excess_PC.sum(0) / out.teacher_sum_N
    log_ratio_C = (out.student_sum_N / out.teacher_sum_N).log()
    torch.where(excess_C.abs() < 0.25, excess_C.log1p(), log_ratio_C, out=out.log_ratio_N)
    own_PC, total_C = (student_sum_PC, out.student_sum_N) if beta else (teacher_sum_PC, out.teacher_sum_N)
    terms_PC = own_PC * (parts.mean_N + (ahead_PC if beta else -ahead_PC))
    torch.div(terms_PC.masked_fill_(own_PC == 0, 0).sum(0), total_C, out=out.mean_N)
    torch.add(out.mean_N, out.log_ratio_N, alpha=-1 if beta else 1, out=out.loss_N)


def _merged(max_PC: Tensor, sum_PC: Tensor, out_max_C: Tensor, out_sum_C: Tensor) -> tuple[Tensor, Tensor]:
    """Write a head's maximum and sum; return each part's distance to the maximum, and its share."""
    absent_PC = sum_PC == 0  # no classes here, or a bias of -inf excludes all of them
    torch.amax(max_PC.masked_fill(absent_PC, -torch.inf), 0, out=out_max_C)
    shift_PC = (max_PC - out_max_C).masked_fill_(absent_PC, 0)
    share_PC = sum_PC * shift_PC.exp()
    torch.sum(share_PC, 0, out=out_sum_C)
    return shift_PC, share_PC
