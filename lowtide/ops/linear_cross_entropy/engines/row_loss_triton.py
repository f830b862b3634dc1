"""Compute the vectors of the rows, the factor of a mean and the loss, each in one Triton launch.

Plain torch takes some thirty launches of a few numbers each, and a small call waits for them. Sums
are taken in a fixed order.

row_math.py has the formulas. With label smoothing e and z-loss l, target_share is 1 - e,
smoothing_share is e/V, and lse_share is 2 l.

Shapes: N tokens, of which M are kept; V classes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches
from lowtide.ops.linear_cross_entropy.definition.head import Labels
from lowtide.ops.linear_cross_entropy.definition.validation import check_classes
from lowtide.ops.linear_cross_entropy.engines import row_results_triton
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs, RowStats
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows_triton import order_rows
from lowtide.ops.linear_cross_entropy.engines.row_loss import RowLoss
from lowtide.ops.linear_cross_entropy.engines.row_results_triton import stride_of, target_logit_of

# Rows that a program takes at a time. A sum over the rows is taken by one program of SUM_BLOCK
# rows.
BLOCK, WARPS = 512, 4
SUM_BLOCK, SUM_WARPS = 4096, 16
# VECTORS vectors are allocated at once, because each allocation takes the host 5 microseconds. Each
# is padded to a multiple of ALIGNED float32 numbers, so that the next begins at a multiple of 16
# bytes.
VECTORS, ALIGNED = 8, 4


@remember_launches
@triton.jit(do_not_specialize=["N", "V", "ignore_index"])
def _row_vectors_kernel(
    label_N_ptr, class_weight_V_ptr, total_weight_ptr, row_weight_N_ptr, upstream_N_ptr,
    target_N_ptr, ignored_N_ptr, invalid_target_N_ptr, target_weight_N_ptr,
    softmax_coef_N_ptr, target_coef_N_ptr, smoothing_coef_N_ptr, lse_coef_N_ptr,
    normalizer_ptr, denominator_ptr, factor_ptr, one_ptr,
    N, V, label_stride, row_weight_stride, upstream_stride,
    ignore_index, target_share, smoothing_share, lse_share, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute each row's target and weight, and its coefficients. Grid: (cdiv(N, BLOCK),).

    Results whose pointer is None are not written. Labels are integers of any dtype; row weights and
    upstream gradients are numbers of any dtype. Without label smoothing softmax_coef is target_coef
    and is not written. With factor_ptr, a single program also stores what a mean needs. one_ptr
    gets the number 1.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < N
    label = tl.load(label_N_ptr + rows * label_stride, mask=inside, other=0).to(tl.int64)
    ignored = label == ignore_index
    outside = (label < 0) | (label >= V)
    invalid = outside & (label != ignore_index)
    target = tl.where(ignored | outside, 0, label)
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if class_weight_V_ptr is not None:
        weight = tl.load(class_weight_V_ptr + target, mask=inside & (outside == 0), other=0.0)
    weight = tl.where(ignored, 0.0, tl.where(invalid, float("nan"), weight))
    upstream = tl.full((BLOCK,), 1.0, tl.float32)
    if upstream_N_ptr is not None:
        places = rows * upstream_stride
        upstream = tl.load(upstream_N_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if row_weight_N_ptr is not None:
        places = rows * row_weight_stride
        upstream *= tl.load(row_weight_N_ptr + places, mask=inside, other=0.0).to(tl.float32)
    if target_N_ptr is not None:
        tl.store(target_N_ptr + rows, target, mask=inside)
        tl.store(ignored_N_ptr + rows, ignored, mask=inside)
        tl.store(target_weight_N_ptr + rows, weight, mask=inside)
    if invalid_target_N_ptr is not None:
        tl.store(invalid_target_N_ptr + rows, invalid, mask=inside)
    upstream = tl.where(ignored, 0.0, upstream)
    target_coef = weight * target_share * upstream
    tl.store(target_coef_N_ptr + rows, target_coef, mask=inside)
    if smoothing_coef_N_ptr is not None:
        smoothing_coef = upstream * smoothing_share
        total_weight = V if total_weight_ptr is None else tl.load(total_weight_ptr)
        softmax_coef = target_coef + smoothing_coef * total_weight
        tl.store(softmax_coef_N_ptr + rows, softmax_coef, mask=inside)
        tl.store(smoothing_coef_N_ptr + rows, smoothing_coef, mask=inside)
    if lse_coef_N_ptr is not None:
        tl.store(lse_coef_N_ptr + rows, upstream * lse_share, mask=inside)
    if one_ptr is not None:
        tl.store(one_ptr, 1.0, mask=tl.program_id(0) == 0)
    if factor_ptr is not None:
        kept = (inside & (label != ignore_index)).to(tl.int32)
        _store_mean(tl.where(inside, weight, 0.0), kept, normalizer_ptr, denominator_ptr, factor_ptr)


@triton.jit
def _store_mean(weight, kept, normalizer_ptr, denominator_ptr, factor_ptr):
    """Store the denominator of a mean, unless a normalizer is given, and 1 / denominator.

    If every row is ignored, the denominator is NaN, so that the loss is NaN as in torch, and the
    factor is 1.
    """
    some = tl.max(kept, 0) != 0
    if normalizer_ptr is None:
        denominator = tl.sum(weight, 0)
        tl.store(denominator_ptr, tl.where(some, denominator, float("nan")))
    else:
        denominator = tl.load(normalizer_ptr).to(tl.float32)
    tl.store(factor_ptr, tl.div_rn(1.0, tl.where(some, denominator, 1.0)))


@remember_launches
@triton.jit(do_not_specialize=["N"])
def _mean_kernel(
    target_weight_N_ptr, ignored_N_ptr, normalizer_ptr, denominator_ptr, factor_ptr, N, BLOCK: tl.constexpr
):
    """Store the denominator of a mean and the factor, for any number of rows. Grid: (1,)."""
    weight = tl.zeros((BLOCK,), tl.float32)
    kept = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK).to(tl.int64)
        inside = rows < N
        kept |= (tl.load(ignored_N_ptr + rows, mask=inside, other=1) == 0).to(tl.int32)
        if normalizer_ptr is None:
            weight += tl.load(target_weight_N_ptr + rows, mask=inside, other=0.0)
    _store_mean(weight, kept, normalizer_ptr, denominator_ptr, factor_ptr)


@remember_launches
@triton.jit(do_not_specialize=["N"])
def _loss_kernel(
    target_weight_N_ptr, ignored_N_ptr, nll_N_ptr, smooth_nll_N_ptr, max_N_ptr, sum_N_ptr,
    target_logit_N_ptr, row_weight_N_ptr, denominator_ptr, loss_N_ptr, loss_ptr,
    N, row_weight_stride, target_share, smoothing_share, z_loss, Z_LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute each row's loss, or with loss_ptr their sum, divided by the denominator if given.

    Grid: any number of programs, which take the blocks in turn; a single program for the sum.
    """
    total = tl.zeros((BLOCK,), tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, N, step):
        rows = start + tl.arange(0, BLOCK)
        inside = rows < N
        ignored = tl.load(ignored_N_ptr + rows, mask=inside, other=1) != 0
        weight = tl.load(target_weight_N_ptr + rows, mask=inside, other=0.0)
        loss = weight * target_share * tl.load(nll_N_ptr + rows, mask=inside, other=0.0)
        if smooth_nll_N_ptr is not None:
            loss += tl.load(smooth_nll_N_ptr + rows, mask=inside, other=0.0) * smoothing_share
        if Z_LOSS:
            max = tl.load(max_N_ptr + rows, mask=inside, other=0.0)
            sum = tl.load(sum_N_ptr + rows, mask=inside, other=1.0)
            if target_logit_N_ptr is not None:  # the sum excludes the target
                sum += tl.exp(tl.load(target_logit_N_ptr + rows, mask=inside, other=0.0) - max)
            lse = tl.log(sum) + max
            loss += z_loss * lse * lse
        if row_weight_N_ptr is not None:
            places = rows * row_weight_stride
            loss *= tl.load(row_weight_N_ptr + places, mask=inside, other=0.0).to(tl.float32)
        loss = tl.where(ignored, 0.0, loss)
        if loss_N_ptr is not None:
            tl.store(loss_N_ptr + rows, loss, mask=inside)
        total += loss
    if loss_ptr is not None:
        loss = tl.sum(total, 0)
        if denominator_ptr is not None:
            loss = tl.div_rn(loss, tl.load(denominator_ptr).to(tl.float32))
        tl.store(loss_ptr, loss)


class TritonRowLoss(RowLoss):
    """Hold the labels of each row on the backend "triton".

    The target holds class indices, and no other rank has to be asked for labels. All rows are kept.
    If the plan skips ignored rows, they come last.
    """

    def _set_rows(self, labels: Labels) -> None:
        self.soft_NV, self.kept_rows, self.M = None, None, self.N
        label_N, row_weight = labels.target.flatten(), labels.row_weight
        check_classes(label_N, self.V, self.plan.options.ignore_index)
        if self.plan.skips_ignored:
            self.counted_rows = order_rows(label_N, self.plan.options.ignore_index)
            self.kept_rows = self.counted_rows.row_N
        self.label_N = self.of_kept(label_N)
        self.row_weight_N = None if row_weight is None else self.of_kept(row_weight.flatten())
        self.spare_vectors = self._spare_vectors()
        self.target_N, self.ignored_N = self._empty(self.M, torch.long), self._empty(self.M, torch.bool)
        self.target_weight_N, invalid_target_N = self.vector(), None
        if self.plan.call_kind.log_probs:
            invalid_target_N = self.invalid_target_N = self._empty(self.M, torch.bool)
        known = (self.target_N, self.ignored_N, invalid_target_N, self.target_weight_N)
        self.normalizer, self.mean_of_rows = labels.normalizer, None
        if 0 < self.M <= SUM_BLOCK and self.plan.options.reduction == "mean":
            self.mean_of_rows = self._mean_memory(self.normalizer)
        self.written_one = None if self.plan.options.reduction == "mean" or not self.M else self._empty(())
        self.own_coefs = self._coefs(None, known, self.mean_of_rows, self.written_one)

    def one(self) -> Tensor:
        return super().one() if self.written_one is None else self.written_one

    def of_all(self, vector_M: Tensor, ignored: float = 0) -> Tensor:  # [N]
        vector_M = vector_M.masked_fill(self.ignored_N, ignored)
        return vector_M if self.counted_rows is None else vector_M[self.counted_rows.place_N]

    def coefs(self, upstream_N: Tensor | None = None) -> RowCoefs:
        if upstream_N is None:
            return self.own_coefs
        return self._coefs(self.of_kept(upstream_N), (None,) * 4)

    def _coefs(
        self,
        upstream_N: Tensor | None,
        targets: tuple[Tensor | None, ...],
        mean: tuple[Tensor, Tensor] | None = None,
        one: Tensor | None = None,
    ) -> RowCoefs:
        """Return the coefficients, and write `targets`, `mean` and `one`.

        `targets` is memory for target_N, ignored_N, invalid_target_N and target_weight_N; what is
        None is not written. `mean` is memory for the denominator of a mean and the gradients'
        factor. It is given only if a single program takes all rows.
        """
        options, smoothed = self.plan.options, self.plan.options.label_smoothing > 0
        target_coef_N = self.vector()
        softmax_coef_N = self.vector() if smoothed else target_coef_N
        smoothing_coef_N = self.vector() if smoothed else None
        lse_coef_N = self.vector() if options.z_loss else None
        total_weight = self.total_weight() if smoothed else None
        by_row = (self.label_N, self.row_weight_N, upstream_N)
        if self.M:
            block, warps = (BLOCK, WARPS) if mean is None else (SUM_BLOCK, SUM_WARPS)
            _row_vectors_kernel[(cdiv(self.M, block),)](
                self.label_N, self.class_weight_V,
                total_weight if isinstance(total_weight, Tensor) else None, self.row_weight_N, upstream_N,
                *targets, softmax_coef_N, target_coef_N, smoothing_coef_N, lse_coef_N,
                *((None,) * 3 if mean is None else (self.normalizer, *mean)), one,
                self.M, self.V, *map(stride_of, by_row), options.ignore_index,
                *self._shares(), 2 * options.z_loss, BLOCK=block, num_warps=warps,
            )  # fmt: skip
        vectors = (self.target_N, self.ignored_N, softmax_coef_N, target_coef_N, smoothing_coef_N)
        return RowCoefs(*vectors, lse_coef_N=lse_coef_N)

    def mean(self, normalizer: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.mean_of_rows is not None and normalizer is self.normalizer:
            return self.mean_of_rows
        denominator, factor = self._mean_memory(normalizer)
        _mean_kernel[(1,)](
            self.target_weight_N, self.ignored_N, normalizer, denominator, factor, self.M,
            BLOCK=SUM_BLOCK, num_warps=SUM_WARPS,
        )  # fmt: skip
        return denominator, factor

    def _mean_memory(self, normalizer: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return memory for the denominator of a mean and for the gradients' factor.

        A normalizer that is given is the denominator itself.
        """
        return self._empty(()) if normalizer is None else normalizer, self._empty(())

    results = row_results_triton.results
    log_prob_coefs = row_results_triton.log_prob_coefs

    def loss_N(self, stats: RowStats) -> Tensor:
        loss_N = self.vector()
        if self.M:
            self._launch_loss((cdiv(self.M, BLOCK),), stats, None, loss_N, None, BLOCK, WARPS)
        return loss_N

    def total_loss(self, stats: RowStats, denominator: Tensor | None) -> Tensor:
        loss = self._empty(())
        self._launch_loss((1,), stats, denominator, None, loss, SUM_BLOCK, SUM_WARPS)
        return loss

    def _launch_loss(
        self,
        grid: tuple[int],
        stats: RowStats,
        denominator: Tensor | None,
        loss_N: Tensor | None,
        loss: Tensor | None,
        block: int,
        warps: int,
    ) -> None:
        z_loss = self.plan.options.z_loss
        _loss_kernel[grid](
            self.target_weight_N, self.ignored_N, stats.nll_N, stats.smooth_nll_N, stats.max_N, stats.sum_N,
            target_logit_of(stats), self.row_weight_N, denominator, loss_N, loss,
            self.M, stride_of(self.row_weight_N), *self._shares(), z_loss,
            Z_LOSS=bool(z_loss), BLOCK=block, num_warps=warps,
        )  # fmt: skip

    def _shares(self) -> tuple[float, float]:
        """Return the factors that label smoothing gives the target's term and each class's term."""
        smoothing = self.plan.options.label_smoothing
        return 1 - smoothing, smoothing / max(self.V, 1)

    def vector(self) -> Tensor:
        return self.spare_vectors.pop() if self.spare_vectors else super().vector()

    def _spare_vectors(self) -> list[Tensor]:
        """Allocate the vectors of a mean or sum at once, because none of them outlives the call."""
        if self.plan.options.reduction == "none" or self.plan.call_kind.log_probs:
            return []
        spare = self._empty((VECTORS, cdiv(self.M, ALIGNED) * ALIGNED))
        return list((spare if self.M % ALIGNED == 0 else spare[:, : self.M]).unbind())

    def _empty(self, size: Any, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(size, dtype=dtype or self.plan.sum_dtype, device=self.device)
