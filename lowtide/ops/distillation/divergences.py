"""Define the divergences of two heads and their gradients.

s and t are the log-probabilities of student and teacher, and z the student's logits divided by the
temperature. The loss L of a row and its gradient, with sums over the classes, are

    forward KL       L = sum e^t (t - s)               dL/dz = e^s - e^t
    reverse KL       L = sum e^s (s - t)               dL/dz = e^s (s - t - L)
    Jensen-Shannon   L = beta sum e^t (t - m)          dL/dz = (1 - beta) e^s (s - m - K)
                         + (1 - beta) sum e^s (s - m)

    where e^m = beta e^t + (1 - beta) e^s, and K = sum e^s (s - m)

The derivative of m has no part in the last gradient: L changes with m by
-sum (beta e^t + (1 - beta) e^s) dm = -sum e^m dm = -d(sum e^m), which is 0 because sum e^m is 1. A
class of probability 0 adds 0, not 0 times infinity.

`losses` computes these formulas, and autograd can differentiate it to any order. The engine runs a
pass (softmax_torch.py, softmax_triton.py) with other formulas, which keep the digits of small
divergences. For each head let a = z - max z and S = sum e^a. Then t - s = (a_t - a_s) + d with
d = log(S_s / S_t), and

    forward KL       L = M + d               dL/dz = e^s - e^t
                     M = sum e^t (a_t - a_s)
    reverse KL       L = M - d               dL/dz = e^s (a_s - a_t - M)
                     M = sum e^s (a_s - a_t)

In these formulas no log-sum-exp is rounded, whose error would grow with log V. If the heads are
close, a_t - a_s has no rounding error, and S_s - S_t is a sum of differences that have none. For
Jensen-Shannon, t - m and s - m are computed from t - s, never from m.

Shapes: C rows, V classes.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def losses(s_CV: Tensor, t_CV: Tensor, beta: float) -> Tensor:  # [C]
    """Return the divergence of each row, from the log-probabilities of both heads."""
    if beta == 0:
        return (t_CV.exp() * (t_CV - s_CV).masked_fill(t_CV == -torch.inf, 0)).sum(1)
    if beta == 1:
        return (s_CV.exp() * (s_CV - t_CV).masked_fill(s_CV == -torch.inf, 0)).sum(1)
    # Make an infinite gap a large number: then 0 times the gap is 0, and its gradient is finite.
    gap_CV = (t_CV - s_CV).nan_to_num(0, 1e30, -1e30)
    odds = math.log(beta) - math.log1p(-beta)
    t_gap_CV = F.logsigmoid(gap_CV + odds) - math.log(beta)  # t - m
    s_gap_CV = F.logsigmoid(-gap_CV - odds) - math.log1p(-beta)  # s - m
    return (beta * t_CV.exp() * t_gap_CV + (1 - beta) * s_CV.exp() * s_gap_CV).sum(1)
