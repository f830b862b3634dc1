"""The pass over a tile of logits, in plain torch: row statistics, then, in place, the gradient of the logits.

`kernels.py` has the same function in one Triton kernel. With class weights w, smoothing e and the row's
upstream gradient s, each row i with target t contributes

    loss      = (1 - e) w_t (lse - z_t) + e/V sum_v w_v (lse - z_v)
    gradient  = pull p_v - hit [v = t] - spread w_v                          of s loss, with respect to z_v
    where p_v = exp(z_v - max) / sum,  hit = s (1 - e) w_t,  spread = s e/V,  pull = hit + spread sum_v w_v

Shapes: N tokens, V classes; C rows and B columns of one tile (B = V wherever statistics are taken).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Rows are taken a few at a time on the CPU, so that the five passes over them stay in its cache.
CACHE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Terms:
    """What the gradient of each row is made of; rows that are ignored have pull = 0."""

    target_N: Tensor
    pull_N: Tensor
    hit_N: Tensor
    spread_N: Tensor | None  # with label smoothing only

    def __getitem__(self, rows: slice) -> "Terms":
        spread_C = None if self.spread_N is None else self.spread_N[rows]
        return Terms(self.target_N[rows], self.pull_N[rows], self.hit_N[rows], spread_C)

    def __mul__(self, factor: Tensor) -> "Terms":
        spread_N = None if self.spread_N is None else self.spread_N * factor
        return Terms(self.target_N, self.pull_N * factor, self.hit_N * factor, spread_N)


@dataclass(frozen=True, slots=True)
class Statistics:
    """Of each row: the largest logit, the sum of exp(z - max), lse - z_t, and sum_v w_v (lse - z_v)."""

    max_N: Tensor
    sum_N: Tensor
    gap_N: Tensor
    smooth_N: Tensor | None  # with label smoothing only

    @staticmethod
    def empty(N: int, dtype: torch.dtype, device: torch.device, *, smooth: bool) -> "Statistics":
        def vector() -> Tensor:
            return torch.empty(N, dtype=dtype, device=device)

        return Statistics(vector(), vector(), vector(), vector() if smooth else None)

    def __getitem__(self, rows: slice) -> "Statistics":
        smooth_C = None if self.smooth_N is None else self.smooth_N[rows]
        return Statistics(self.max_N[rows], self.sum_N[rows], self.gap_N[rows], smooth_C)


def softmax_gradient_(
    logits_CB: Tensor,
    terms: Terms,
    statistics: Statistics,
    *,
    take_statistics: bool,
    gradient_dtype: torch.dtype | None,  # None: statistics alone
    bias_B: Tensor | None,
    class_weight_B: Tensor | None,
    first_class: int = 0,
) -> Tensor | None:  # [C, B]
    C, B = logits_CB.shape
    step = max(1, C if logits_CB.is_cuda else CACHE_BYTES // (B * logits_CB.element_size()))
    for start in range(0, C, step):
        rows = slice(start, start + step)
        z_cb, row, stat = logits_CB[rows], terms[rows], statistics[rows]
        if bias_B is not None:
            z_cb.add_(bias_B)
        if take_statistics:
            torch.amax(z_cb, 1, out=stat.max_N)
            target_logit_c1 = z_cb.gather(1, row.target_N[:, None])
        z_cb.sub_(stat.max_N[:, None])
        if take_statistics and stat.smooth_N is not None:
            shifted_c = z_cb.sum(1) if class_weight_B is None else z_cb @ class_weight_B
        z_cb.exp_()
        if take_statistics:
            torch.sum(z_cb, 1, out=stat.sum_N)
            log_sum_c = stat.sum_N.log()
            torch.sub(log_sum_c, target_logit_c1[:, 0] - stat.max_N, out=stat.gap_N)
            if stat.smooth_N is not None:
                total_weight = B if class_weight_B is None else class_weight_B.sum()
                torch.sub(log_sum_c * total_weight, shifted_c, out=stat.smooth_N)
        if gradient_dtype is not None:
            _exponentials_to_gradient_(z_cb, row, stat, class_weight_B, first_class)
    return None if gradient_dtype is None else logits_CB.to(gradient_dtype)


def _exponentials_to_gradient_(
    z_cb: Tensor, row: Terms, stat: Statistics, class_weight_B: Tensor | None, first_class: int
) -> None:
    z_cb.mul_((row.pull_N / stat.sum_N)[:, None])
    if row.spread_N is not None:
        spread_c1 = row.spread_N[:, None]
        z_cb.sub_(spread_c1) if class_weight_B is None else z_cb.addcmul_(spread_c1, class_weight_B, value=-1)
    # The one-hot is subtracted before any rounding: p - 1 would lose its digits where p is near 1.
    column_c = row.target_N - first_class
    inside_c = (column_c >= 0) & (column_c < z_cb.shape[1])
    column_c1 = torch.where(inside_c, column_c, 0)[:, None]
    hit_c = torch.where(inside_c, row.hit_N, 0)
    z_cb.scatter_(1, column_c1, z_cb.gather(1, column_c1) - hit_c[:, None])
