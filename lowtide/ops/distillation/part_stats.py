"""Merge the row statistics of both heads that the ranks computed from their own classes.

Small divergences keep their digits, as they do in the pass (divergences.py). If a part's sums of
both heads are close, their difference is computed from the distance of their logarithms, because a
subtraction would lose digits.

Shapes: C rows of a chunk, P parts of the classes, one on each rank.
"""

import torch
from torch import Tensor

from lowtide.ops.distillation.softmax_torch import Statistics


def merge_sums(out: Statistics, parts: Statistics, beta: float) -> None:
    """Write to `out` the statistics of all classes, from those of the parts, [P, C] each.

    Part p of the student has the maximum m_sp and the sum S_sp, and m_s is the largest m_sp. The
    teacher has m_tp, S_tp and m_t. With r_sp = exp(m_sp - m_s), r_tp likewise,
    x_p = log r_sp - log r_tp and d_p = log(S_sp / S_tp), the statistics of all classes are

        S_s       = sum_p r_sp S_sp, and S_t likewise
        S_s - S_t = sum_p r_tp S_tp (exp(x_p + d_p) - 1)
        M         = sum_p r_sp S_sp (M_p + x_p) / S_s for reverse KL
        M         = sum_p r_tp S_tp (M_p - x_p) / S_t for forward KL

    The parts hold d_p in log_ratio_N and M_p in mean_N. Only for a KL divergence are the losses and
    means written here final. For Jensen-Shannon the engine computes both from the merged sums.
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
    """Write a head's maximum and sum; return log r_p and r_p S_p of each part."""
    absent_PC = sum_PC == 0  # no classes in this part, or a bias of -inf excludes all
    torch.amax(max_PC.masked_fill(absent_PC, -torch.inf), 0, out=out_max_C)
    shift_PC = (max_PC - out_max_C).masked_fill_(absent_PC, 0)
    share_PC = sum_PC * shift_PC.exp()
    torch.sum(share_PC, 0, out=out_sum_C)
    return shift_PC, share_PC
