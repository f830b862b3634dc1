"""Compute the row statistics of a tile of logits, then its gradient in place, in plain torch.

row_math.py has the formulas, softmax_triton.py has the same function as one Triton kernel.

Shapes: C rows and B columns of one tile, whose statistics are those of the tile's classes; c of
these rows at a time.
"""

import torch
from torch import Tensor

from lowtide.core.elementwise import add_row_sum, exp_, rounded_in_place, rows_in_memory
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    RowCoefs,
    SoftmaxStats,
    TileColumns,
    whole_softmax_coef,
)

# Bytes of logits per thread that are taken at a time on the CPU, so that the passes over them stay
# in the thread's cache.
CACHE_BYTES = 1 << 20  # decision 0026


def softmax_gradient_(
    logits_CB: Tensor,
    coefs: RowCoefs,
    stats: SoftmaxStats,
    columns: TileColumns,
    *,
    take_stats: bool,
    gradient_dtype: torch.dtype | None,  # None: statistics only
    keep_logits: bool = False,  # True, with statistics only: leave the logits as they are
    bias_sum_B: Tensor | None = None,
) -> Tensor | None:  # [C, B]
    """Turn a tile of logits into its gradient in place, and compute the row statistics if asked.

    Add the sum of the gradient's rows, which are not rounded yet, to `bias_sum_B`, if given.
    """
    C, B = logits_CB.shape
    cached = CACHE_BYTES * torch.get_num_threads() // (B * logits_CB.element_size())
    on_cpu = logits_CB.device.type == "cpu"
    step = max(1, cached if on_cpu else C)
    dtype = gradient_dtype or logits_CB.dtype
    rounds, grad_CB = dtype != logits_CB.dtype, logits_CB
    in_place = rounds and on_cpu and logits_CB.is_contiguous()
    if rounds:
        grad_CB = rows_in_memory(logits_CB, dtype) if in_place else torch.empty_like(logits_CB, dtype=dtype)
    for start in range(0, C, step):
        rows = slice(start, start + step)
        row, stat, column = coefs[rows], stats[rows], columns[rows]
        u_cb = logits_CB[rows].clone() if keep_logits else logits_CB[rows]
        if column.transform.bias_V is not None:
            u_cb.add_(column.transform.bias_V)
        raw_cb = None if stat.grad_dot_logit_N is None else u_cb.clone()
        z_cb, slope_cb = column.transform.apply(u_cb, in_place=True, sloped=gradient_dtype is not None)
        if take_stats:
            torch.amax(z_cb, 1, out=stat.max_N)
            if stat.argmax_N is not None:
                torch.argmax(z_cb, 1, out=stat.argmax_N)
            if stat.nll_N is not None:  # holds z_t - max until the sum is known
                torch.sub(z_cb.gather(1, row.target_N[:, None])[:, 0], stat.max_N, out=stat.nll_N)
        shift_cb = z_cb.sub_(stat.max_N[:, None])
        soft_cb = None
        if column.soft_CB is not None:
            soft_cb = column.soft_CB.to(z_cb.dtype) * column.smoothing[0] + column.smoothing[1]
            soft_cb = soft_cb if column.class_weight_B is None else soft_cb * column.class_weight_B
        if take_stats:
            _take_sums_of_shifts(shift_cb, stat, soft_cb, column.class_weight_B)
        reads_shift = row.entropy_coef_N is not None or (take_stats and stat.mean_N is not None)
        exp_cb = exp_(shift_cb.clone() if reads_shift else shift_cb)
        if take_stats:
            _take_stats(exp_cb, shift_cb, stat, column.class_weight_B)
        if gradient_dtype is None:
            continue
        grad_cb = _exponentials_to_gradient_(exp_cb, shift_cb, row, stat, column, soft_cb)
        if slope_cb is not None:
            grad_cb.mul_(slope_cb)
        if stat.grad_dot_logit_N is not None:
            torch.sum(grad_cb * raw_cb, 1, out=stat.grad_dot_logit_N)
        if rounds:
            add_row_sum(bias_sum_B, grad_cb)
        if in_place and start == 0 and not reads_shift:
            rounded_in_place(grad_cb, dtype)
        elif rounds or reads_shift:
            # In place, these rows end before the logits of the same rows begin: half as long, and
            # at least `step` rows of logits have been read.
            grad_CB[rows] = grad_cb
    if gradient_dtype is None:
        return None
    if not rounds:
        add_row_sum(bias_sum_B, grad_CB)
    return grad_CB


def _take_sums_of_shifts(
    shift_cb: Tensor, stat: SoftmaxStats, soft_cb: Tensor | None, class_weight_B: Tensor | None
) -> None:
    """Compute weighted sums of z - max.

    The log-sum-exp is not known yet; `_take_stats` turns these sums into those of lse - z.
    """
    if stat.smooth_nll_N is not None:
        stat.smooth_nll_N.copy_(shift_cb.sum(1) if class_weight_B is None else shift_cb @ class_weight_B)
    if soft_cb is not None:
        torch.sum(soft_cb, 1, out=stat.soft_mass_N)
        torch.sum(soft_cb * shift_cb, 1, out=stat.soft_nll_N)


def _take_stats(exp_cb: Tensor, shift_cb: Tensor, stat: SoftmaxStats, class_weight_B: Tensor | None) -> None:
    torch.sum(exp_cb, 1, out=stat.sum_N)
    log_sum_c = stat.sum_N.log()
    if stat.nll_N is not None:
        torch.sub(log_sum_c, stat.nll_N, out=stat.nll_N)
    if stat.smooth_nll_N is not None:
        total_weight = exp_cb.shape[1] if class_weight_B is None else class_weight_B.sum()
        torch.sub(log_sum_c * total_weight, stat.smooth_nll_N, out=stat.smooth_nll_N)
    if stat.soft_nll_N is not None:
        torch.sub(log_sum_c * stat.soft_mass_N, stat.soft_nll_N, out=stat.soft_nll_N)
    if stat.mean_N is not None:
        # A class with z = -inf has probability 0; it adds 0 to the mean, not 0 times infinity.
        shift_cb.masked_fill_(shift_cb == -torch.inf, 0)
        torch.div((exp_cb * shift_cb).sum(1), stat.sum_N, out=stat.mean_N)


def _exponentials_to_gradient_(
    exp_cb: Tensor,
    shift_cb: Tensor,
    row: RowCoefs,
    stat: SoftmaxStats,
    columns: TileColumns,
    soft_cb: Tensor | None,
) -> Tensor:
    """Turn the exponentials into the gradient in place, without the slope of a soft cap."""
    softmax_coef_c = whole_softmax_coef(row, stat, lambda: stat.logsumexp_N)
    grad_cb = exp_cb
    if row.entropy_coef_N is None:
        grad_cb.mul_((softmax_coef_c / stat.sum_N)[:, None])
    else:
        shift_cb.masked_fill_(shift_cb == -torch.inf, 0)
        shift_cb.mul_((row.entropy_coef_N / stat.sum_N)[:, None]).add_((softmax_coef_c / stat.sum_N)[:, None])
        grad_cb.mul_(shift_cb)
    if row.smoothing_coef_N is not None:
        smoothing_coef_c1, class_weight_B = row.smoothing_coef_N[:, None], columns.class_weight_B
        grad_cb.sub_(smoothing_coef_c1) if class_weight_B is None else grad_cb.addcmul_(
            smoothing_coef_c1, class_weight_B, value=-1
        )
    if row.soft_target_coef_N is not None:
        return grad_cb.addcmul_(row.soft_target_coef_N[:, None], soft_cb, value=-1)
    # Subtract the target's term before the gradient is rounded: where p is near 1, a rounded p
    # would leave p - 1 few digits.
    column_c = row.target_N - columns.first_class
    inside_c = (column_c >= 0) & (column_c < grad_cb.shape[1])
    column_c1 = torch.where(inside_c, column_c, 0)[:, None]
    target_coef_c = torch.where(inside_c, row.target_coef_N, 0)
    return grad_cb.scatter_(1, column_c1, grad_cb.gather(1, column_c1) - target_coef_c[:, None])
