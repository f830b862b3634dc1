"""Define the divergences, by these formulas.

With s and t the log-probabilities of student and teacher, and z the student's logits,

    forward KL       L = sum e^t (t - s)               dL/dz = e^s - e^t
    reverse KL       L = sum e^s (s - t)               dL/dz = e^s (s - t - L)
    Jensen-Shannon   L = beta sum e^t (t - m)          dL/dz = (1 - beta) e^s (s - m - K)
                         + (1 - beta) sum e^s (s - m)

    where e^m = beta e^t + (1 - beta) e^s, and K = sum e^s (s - m)

The last gradient has no term for m: m adds sum (beta e^t + (1 - beta) e^s) dm = d sum e^m, which is
0. A class of probability 0 adds 0, not 0 times infinity.

`losses` is the definition, for any order of derivative. The passes that the engine runs
(softmax_torch.py, softmax_triton.py) keep the digits of small divergences. They work with a = z -
max z and S = sum e^a of each head, so that t - s = (a_t - a_s) + d with d = log(S_s / S_t), and

    forward KL       L = M + d   where M = sum e^t (a_t - a_s)              dL/dz = e^s - e^t
    reverse KL       L = M - d   where M = sum e^s (a_s - a_t)              dL/dz = e^s (a_s - a_t -
    M)

The rounding of a normaliser, which has the size of log V, does not enter: where the heads are
close, a_t - a_s and S_s - S_t are exact. t - m and s - m are computed from t - s, never from m.

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
    # An infinite gap becomes a large number: 0 times that is 0, and its gradient is finite.
    gap_CV = (t_CV - s_CV).nan_to_num(0, 1e30, -1e30)
    odds = math.log(beta) - math.log1p(-beta)
    t_gap_CV = F.logsigmoid(gap_CV + odds) - math.log(beta)  # t - m
    s_gap_CV = F.logsigmoid(-gap_CV - odds) - math.log1p(-beta)  # s - m
    return (beta * t_CV.exp() * t_gap_CV + (1 - beta) * s_CV.exp() * s_gap_CV).sum(1)
