"""Compute the results of rows, and the coefficients of log-probabilities, each in one launch.

row_math.py has the formulas.

Shapes: N tokens, of which M are kept; all are kept here, perhaps in another order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs, RowStats
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import row_at
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss

BLOCK, WARPS = 512, 4  # rows that a program takes


@remember_launches
@triton.jit(do_not_specialize=["N"])
def _results_kernel(
    ignored_M_ptr, place_N_ptr, invalid_target_M_ptr, max_M_ptr, sum_M_ptr, target_logit_M_ptr, nll_M_ptr,
    mean_M_ptr, argmax_M_ptr, loss_M_ptr, max_N_ptr, sum_N_ptr, mean_N_ptr, log_prob_N_ptr, entropy_N_ptr,
    lse_N_ptr, argmax_N_ptr, loss_N_ptr, N, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute what `RowLoss.results` returns, in the order of the tokens. Grid: (cdiv(N, BLOCK),).

    With loss_N_ptr the losses, or else log-probabilities and what belongs to them. place_N holds
    the place of each token among the rows; without it the rows are in this order.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    places = rows
    if place_N_ptr is not None:
        places = tl.load(place_N_ptr + rows, mask=inside, other=0).to(tl.int64)
    ignored = tl.load(ignored_M_ptr + places, mask=inside, other=1) != 0
    max = tl.load(max_M_ptr + places, mask=inside, other=0.0)
    sum = tl.where(ignored, 1.0, tl.load(sum_M_ptr + places, mask=inside, other=1.0))
    tl.store(max_N_ptr + rows, tl.where(ignored, float("inf"), max), mask=inside)
    tl.store(sum_N_ptr + rows, sum, mask=inside)
    if loss_N_ptr is not None:
        loss = tl.load(loss_M_ptr + places, mask=inside, other=0.0)
        tl.store(loss_N_ptr + rows, tl.where(ignored, 0.0, loss), mask=inside)
    if log_prob_N_ptr is not None:
        total = sum
        if target_logit_M_ptr is not None:  # the sum excludes the target
            exp = tl.exp(tl.load(target_logit_M_ptr + places, mask=inside, other=0.0) - max)
            total = tl.where(ignored, 1.0, exp + sum)
        log_total = tl.log(total)
        log_prob = -tl.load(nll_M_ptr + places, mask=inside, other=0.0)
        invalid = tl.load(invalid_target_M_ptr + places, mask=inside, other=0) != 0
        log_prob = tl.where(invalid, float("nan"), log_prob)
        mean = tl.where(ignored, 0.0, tl.load(mean_M_ptr + places, mask=inside, other=0.0))
        argmax = tl.load(argmax_M_ptr + places, mask=inside, other=0)
        tl.store(mean_N_ptr + rows, mean, mask=inside)
        tl.store(log_prob_N_ptr + rows, tl.where(ignored, 0.0, log_prob), mask=inside)
        tl.store(entropy_N_ptr + rows, tl.where(ignored, 0.0, log_total - mean), mask=inside)
        tl.store(lse_N_ptr + rows, tl.where(ignored, 0.0, max + log_total), mask=inside)
        tl.store(argmax_N_ptr + rows, tl.where(ignored, -1, argmax), mask=inside)


@remember_launches
@triton.jit(do_not_specialize=["M"])
def _log_prob_coefs_kernel(
    ignored_M_ptr, invalid_target_M_ptr, row_M_ptr, mean_M_ptr, grad_log_prob_N_ptr, grad_entropy_N_ptr,
    grad_lse_N_ptr, target_coef_M_ptr, softmax_coef_M_ptr, entropy_coef_M_ptr, M,
    log_prob_stride, entropy_stride, lse_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the coefficients of `RowLoss.log_prob_coefs`. Grid: (cdiv(M, BLOCK),).

    Upstream gradients are numbers of any dtype. Without softmax_coef_M_ptr it is target_coef.
    """
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < M
    rows = row_at(row_M_ptr, places, inside).to(tl.int64)
    counts = inside & (tl.load(ignored_M_ptr + places, mask=inside, other=1) == 0)
    target_coef = tl.zeros((BLOCK,), tl.float32)
    if grad_log_prob_N_ptr is not None:
        grad = tl.load(grad_log_prob_N_ptr + rows * log_prob_stride, mask=counts, other=0.0).to(tl.float32)
        invalid = tl.load(invalid_target_M_ptr + places, mask=inside, other=0) != 0
        target_coef = tl.where(invalid, float("nan"), -grad)
    tl.store(target_coef_M_ptr + places, target_coef, mask=inside)
    softmax_coef = target_coef
    if grad_lse_N_ptr is not None:
        softmax_coef += tl.load(grad_lse_N_ptr + rows * lse_stride, mask=counts, other=0.0).to(tl.float32)
    if grad_entropy_N_ptr is not None:
        grad = tl.load(grad_entropy_N_ptr + rows * entropy_stride, mask=counts, other=0.0).to(tl.float32)
        tl.store(entropy_coef_M_ptr + places, -grad, mask=inside)
        softmax_coef += grad * tl.load(mean_M_ptr + places, mask=inside, other=0.0)
    if softmax_coef_M_ptr is not None:
        tl.store(softmax_coef_M_ptr + places, softmax_coef, mask=inside)


def results(rows: RowLoss, stats: RowStats) -> tuple[list[Tensor], list[Tensor]]:
    """Return the results of all rows, and the statistics that backward needs, as RowLoss does."""
    log_probs, order = rows.plan.call_kind.log_probs, rows.counted_rows
    loss_M = None if log_probs else rows.loss_N(stats)
    # In the order of the tokens these losses are the result.
    loss_N = None if loss_M is None or order is None else rows.vector()
    kept = [rows.vector() for _ in range(3 if log_probs else 2)]
    results = [rows.vector() for _ in range(3)] if log_probs else []
    argmax_N = torch.empty(rows.N, dtype=torch.long, device=rows.device) if log_probs else None
    if rows.N:
        _results_kernel[(cdiv(rows.N, BLOCK),)](
            rows.ignored_N, None if order is None else order.place_N,
            rows.invalid_target_N if log_probs else None, stats.max_N, stats.sum_N,
            target_logit_of(stats) if log_probs else None, stats.nll_N, stats.mean_N, stats.argmax_N,
            loss_M, *kept, *(None,) * (3 - len(kept)), *(results or (None,) * 3), argmax_N, loss_N,
            rows.N, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    if argmax_N is not None:
        return [*results, argmax_N], kept
    assert loss_M is not None
    return [loss_M if loss_N is None else loss_N], kept


def log_prob_coefs(
    rows: RowLoss,
    stats: RowStats,
    grad_log_prob_N: Tensor | None,
    grad_entropy_N: Tensor | None,
    grad_logsumexp_N: Tensor | None,
) -> RowCoefs:
    """Return the coefficients of the gradient, as RowLoss does."""
    upstream = grad_log_prob_N, grad_entropy_N, grad_logsumexp_N
    target_coef_N, softmax_coef_N, entropy_coef_N = rows.vector(), None, None
    if grad_entropy_N is not None:
        entropy_coef_N = rows.vector()
    if grad_entropy_N is not None or grad_logsumexp_N is not None:
        softmax_coef_N = rows.vector()
    if rows.M:
        _log_prob_coefs_kernel[(cdiv(rows.M, BLOCK),)](
            rows.ignored_N, rows.invalid_target_N, rows.kept_rows, stats.mean_N, *upstream,
            target_coef_N, softmax_coef_N, entropy_coef_N, rows.M, *map(stride_of, upstream),
            BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    softmax_coef_N = target_coef_N if softmax_coef_N is None else softmax_coef_N
    vectors = rows.target_N, rows.ignored_N, softmax_coef_N, target_coef_N
    return RowCoefs(*vectors, entropy_coef_N=entropy_coef_N)


def target_logit_of(stats: RowStats) -> Tensor | None:
    """Return the targets' logits, if the sums of the exponentials exclude them."""
    return stats.target_logit_N if isinstance(stats, ExcludedTargetStats) else None


def stride_of(vector: Tensor | None) -> int:
    return 1 if vector is None else vector.stride(0)
