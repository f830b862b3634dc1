r"""The formulas. With s and t the log-probabilities of student and teacher, z the student's logits,

    forward KL       L = sum e^t (t - s)                                    dL/dz = e^s - e^t
    reverse KL       L = sum e^s (s - t)                                    dL/dz = e^s (s - t - L)
    Jensen-Shannon   L = beta sum e^t (t - m) + (1 - beta) sum e^s (s - m)  dL/dz = (1 - beta) e^s (s - m - K)

    where e^m = beta e^t + (1 - beta) e^s, and K = sum e^s (s - m)

The last gradient is so short because what m adds to it, sum (beta e^t + (1 - beta) e^s) dm = d sum e^m, is 0.
A class of probability 0 adds 0, not 0 times infinity.

`losses` is the definition, for any order of derivative. `losses_and_gradients` is what the engine runs, where
small divergences keep their digits. The rounding of both normalisers enters a KL divergence at first order;
e^s - e^t, which sums to zero but for that very rounding, takes it out again. t - m and s - m are taken from
t - s, never from m.

Shapes: C rows, V classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def losses(s_CV: Tensor, t_CV: Tensor, beta: float) -> Tensor:  # [C]
    if beta == 0:
        return (t_CV.exp() * (t_CV - s_CV).masked_fill(t_CV == -torch.inf, 0)).sum(1)
    if beta == 1:
        return (s_CV.exp() * (s_CV - t_CV).masked_fill(s_CV == -torch.inf, 0)).sum(1)
    gap_CV = (t_CV - s_CV).nan_to_num(0)
    odds = math.log(beta) - math.log1p(-beta)
    t_gap_CV = F.logsigmoid(gap_CV + odds) - math.log(beta)  # t - m
    s_gap_CV = F.logsigmoid(-gap_CV - odds) - math.log1p(-beta)  # s - m
    return (beta * t_CV.exp() * t_gap_CV + (1 - beta) * s_CV.exp() * s_gap_CV).sum(1)


def losses_and_gradients(s_cv: Tensor, t_cv: Tensor, beta: float) -> tuple[Tensor, Tensor]:  # [c], [c, V]
    if beta == 0:
        return _forward_kl(s_cv, t_cv)
    if beta == 1:
        return _reverse_kl(s_cv, t_cv)
    return _jensen_shannon(s_cv, t_cv, beta)


def _forward_kl(s_cv: Tensor, t_cv: Tensor) -> tuple[Tensor, Tensor]:
    teacher_cv = t_cv.exp()
    term_cv = (t_cv - s_cv).masked_fill_(t_cv == -torch.inf, 0).mul_(teacher_cv)
    gradient_cv = s_cv.exp().sub_(teacher_cv)
    return term_cv.sum(1) + gradient_cv.sum(1), gradient_cv


def _reverse_kl(s_cv: Tensor, t_cv: Tensor) -> tuple[Tensor, Tensor]:
    student_cv = s_cv.exp()
    surplus_c = t_cv.exp().sub_(student_cv).sum(1)
    gap_cv = (s_cv - t_cv).masked_fill_(s_cv == -torch.inf, 0)
    mean_c = (student_cv * gap_cv).sum(1)
    return mean_c + surplus_c, gap_cv.sub_(mean_c[:, None]).mul_(student_cv)


def _jensen_shannon(s_cv: Tensor, t_cv: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    gap_cv = (t_cv - s_cv).nan_to_num_(0)  # an infinite one: the largest number, which 0 takes to 0
    # Whichever of both is the larger is the nearer to m: by log1p of something small.
    share_cv = (gap_cv >= 0).to(gap_cv.dtype).mul_(1 - 2 * beta).add_(beta)
    near_cv = gap_cv.abs().neg_().expm1_().mul_(share_cv).log1p_().neg_()
    del share_cv
    teacher_term_cv = t_cv.exp().mul_(gap_cv.clamp(max=0).add_(near_cv))
    s_gap_cv = near_cv.sub_(gap_cv.clamp_(min=0))
    student_cv = s_cv.exp()
    student_term_cv = student_cv * s_gap_cv
    mean_c = student_term_cv.sum(1)
    # Term by term: the two sums cancel at first order.
    loss_c = teacher_term_cv.mul_(beta).add_(student_term_cv, alpha=1 - beta).sum(1)
    return loss_c, s_gap_cv.sub_(mean_c[:, None]).mul_(student_cv).mul_(1 - beta)
