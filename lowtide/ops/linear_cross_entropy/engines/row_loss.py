"""Compute each row's target and weight, its loss, and the coefficients of its gradient.

row_math.py has the formulas.

Shapes: N tokens, of which M are kept (not ignored); V classes.
"""

import functools
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.definition.head import Head, Labels
from lowtide.ops.linear_cross_entropy.definition.validation import check_classes
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs, RowStats
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import CountedRows
from lowtide.ops.linear_cross_entropy.engines.part_stats import gather_parts
from lowtide.ops.linear_cross_entropy.engines.token_order import TokenOrder

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.planning.plan import Plan

Stats = TypeVar("Stats", bound=RowStats)


class RowLoss:
    """Hold the labels of each kept row.

    In plain torch on the CPU, the kept rows are those that are not ignored. On CUDA all rows are
    kept, because counting would wait for the device; `counted_rows` holds their order if ignored
    rows are skipped. If ranks have tokens of their own, the rows of all ranks are kept, and those
    that are True in `cleared_N` are read as zeros.
    """

    def __init__(self, plan: "Plan", head: Head, labels: Labels) -> None:
        self.plan, self.device = plan, head.device
        self.N, self.V = head.tokens, plan.options.num_classes or head.classes
        self.own_classes, self.order = head.classes, None
        self.counted_rows: CountedRows | None = None
        if plan.agreement is not None and plan.options.tokens_sharded and plan.agreement.group.size > 1:
            self.order = TokenOrder(plan.agreement, self.device)
        self.cleared_N: Tensor | None = None
        self.class_weight_V = as_vector(labels.class_weight, plan.sum_dtype)
        self._set_rows(labels)

    def _set_rows(self, labels: Labels) -> None:
        self._set_target(labels.target)
        self.row_weight_N: Tensor | None = None
        if labels.row_weight is not None:
            self.row_weight_N = self._of_kept_as_sums(labels.row_weight.flatten())

    def _set_target(self, target: Tensor) -> None:
        self.soft_NV, self.kept_rows = None, None
        if self.plan.call_kind.probabilities:
            self.soft_NV = target.reshape(self.N, self.own_classes)
            self.M = self.N
            self.ignored_N = torch.zeros(self.N, dtype=torch.bool, device=self.device)
            self.invalid_target_N = self.ignored_N
            self.target_N = torch.zeros(self.N, dtype=torch.long, device=self.device)
            return
        ignore_index = self.plan.options.ignore_index
        target_N = target.flatten().long()  # a narrower dtype would wrap ignore_index
        if self.order is not None:
            target_N = self.order.gather(target_N, ignore_index)
        check_classes(target_N, self.V, ignore_index)
        ignored_N = target_N == ignore_index
        leaves_out = self.device.type == "cpu" and self.plan.backend == "torch" and bool(ignored_N.any())
        if leaves_out and self.order is not None:
            self.cleared_N = ignored_N  # not left out, because ranks must take equally many rows
        elif leaves_out:
            self.kept_rows = (~ignored_N).nonzero()[:, 0]
            target_N, ignored_N = target_N[self.kept_rows], ignored_N[self.kept_rows]
        self.M = target_N.shape[0]
        self.ignored_N = ignored_N
        self.invalid_target_N = ((target_N < 0) | (target_N >= self.V)) & ~ignored_N
        self.target_N = target_N.masked_fill(ignored_N | self.invalid_target_N, 0)

    # Convert vectors of this rank's rows to vectors of kept rows, and back.

    def of_kept(self, vector_N: Tensor, fill: float = 0) -> Tensor:  # [M]
        """Return the vector of kept rows.

        If ranks have tokens of their own, `fill` stands in rows that fill up ranks with fewer
        tokens.
        """
        if self.order is not None:
            return self.order.gather(vector_N, fill)
        return vector_N if self.kept_rows is None else vector_N[self.kept_rows]

    def of_all(self, vector_M: Tensor, ignored: float = 0) -> Tensor:  # [N]
        """Return the vector of all rows of this rank, with `ignored` in ignored rows."""
        if self.kept_rows is None:
            vector_M = vector_M.masked_fill(self.ignored_N, ignored)
            return vector_M if self.order is None else self.order.own(vector_M)
        return vector_M.new_full((self.N,), ignored).index_copy_(0, self.kept_rows, vector_M)

    # The results of rows, and the coefficients of their gradients.

    def results(self, stats: RowStats) -> tuple[list[Tensor], list[Tensor]]:
        """Return the results of all rows of this rank, and the statistics that backward needs.

        The results are losses, or else log_prob, entropy, logsumexp and argmax. The statistics are
        max_N, sum_N, and mean_N or soft_mass_N if the call needs one. An ignored row has an
        infinite maximum, so that its exponentials are 0, whatever its logits are.
        """
        if self.plan.call_kind.log_probs:
            log_prob_N = stats.nll_N.neg().masked_fill_(self.invalid_target_N, torch.nan)
            results = [self.of_all(each) for each in (log_prob_N, stats.entropy_N, stats.logsumexp_N)]
            results.append(self.of_all(stats.argmax_N, ignored=-1))
        else:
            results = [self.of_all(self.loss_N(stats))]
        kept = [self.of_all(stats.max_N, ignored=torch.inf), self.of_all(stats.sum_N, ignored=1)]
        third = stats.mean_N if self.plan.call_kind.log_probs else stats.soft_mass_N
        return results, kept if third is None else [*kept, self.of_all(third)]

    def loss_N(self, stats: RowStats) -> Tensor:
        options = self.plan.options
        if stats.soft_nll_N is not None:
            loss_N = stats.soft_nll_N.clone()
        else:
            loss_N = self._target_coef_weight_N() * stats.nll_N
        if stats.smooth_nll_N is not None:
            loss_N.add_(stats.smooth_nll_N, alpha=options.label_smoothing / self.V)
        if options.z_loss:
            loss_N.addcmul_(*[stats.logsumexp_N] * 2, value=options.z_loss)
        return loss_N if self.row_weight_N is None else loss_N.mul_(self.row_weight_N)

    def total_loss(self, stats: RowStats, denominator: Tensor | None) -> Tensor:
        """Return the sum of the loss of all rows, divided by the denominator if there is one."""
        loss = self.loss_N(stats).masked_fill_(self.ignored_N, 0).sum()
        return loss if denominator is None else loss / denominator

    def denominator(self) -> Tensor:
        """Return what a mean is divided by if no normalizer is given.

        This is the sum of the targets' class weights, or the number of rows if the target holds
        class probabilities. Row weights have no part in it.
        """
        if self.soft_NV is not None:
            return torch.full((), float(self.N), dtype=self.plan.sum_dtype, device=self.device)
        return self.target_weight_N.sum()

    def mean(self, normalizer: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what a mean is divided by (a normalizer, if given), and the gradients' factor."""
        denominator = self.denominator() if normalizer is None else normalizer
        return denominator, mean_factor(denominator, self.ignored_N.all())

    def one(self) -> Tensor:
        """Return the factor of gradients that share none, 0-d."""
        return torch.ones((), dtype=self.plan.sum_dtype, device=self.device)

    def coefs(self, upstream_N: Tensor | None = None) -> RowCoefs:
        """Return the coefficients of the gradient of sum(upstream_N * loss_N).

        If no upstream gradients are given, each is 1. A row's weight is a factor of its loss, so it
        multiplies the row's upstream gradient.
        """
        options = self.plan.options
        smoothing = options.label_smoothing
        one_N = torch.ones_like(self.ignored_N, dtype=self.plan.sum_dtype)
        if upstream_N is not None:
            one_N = self.of_kept(upstream_N).to(one_N.dtype)
        if self.row_weight_N is not None:
            one_N = one_N * self.row_weight_N
        one_N = one_N.masked_fill(self.ignored_N, 0)
        soft_target_coef_N = smoothing_coef_N = None
        if self.soft_NV is not None:
            soft_target_coef_N = one_N
            softmax_coef_N = target_coef_N = torch.zeros_like(one_N)
        else:
            softmax_coef_N = target_coef_N = self._target_coef_weight_N() * one_N
            if smoothing:
                smoothing_coef_N = one_N * (smoothing / self.V)
                softmax_coef_N = softmax_coef_N + smoothing_coef_N * self.total_weight()
        lse_coef_N = one_N * (2 * options.z_loss) if options.z_loss else None
        return RowCoefs(
            self.target_N,
            self.ignored_N,
            softmax_coef_N,
            target_coef_N,
            smoothing_coef_N,
            soft_target_coef_N,
            lse_coef_N,
        )

    def log_prob_coefs(
        self,
        stats: RowStats,
        grad_log_prob_N: Tensor | None,
        grad_entropy_N: Tensor | None,
        grad_logsumexp_N: Tensor | None,
    ) -> RowCoefs:
        """Return the coefficients of the gradient of log-probability, entropy and log-sum-exp.

        The arguments hold the upstream gradients of all rows; None stands for an output without.
        """
        entropy_coef_N = None
        if grad_log_prob_N is None:
            target_coef_N = torch.zeros(self.M, dtype=self.plan.sum_dtype, device=self.device)
        else:
            target_coef_N = self._of_kept_as_sums(grad_log_prob_N).neg()
            target_coef_N.masked_fill_(self.invalid_target_N, torch.nan)
        softmax_coef_N = target_coef_N
        if grad_logsumexp_N is not None:
            softmax_coef_N = softmax_coef_N + self._of_kept_as_sums(grad_logsumexp_N)
        if grad_entropy_N is not None:
            entropy_coef_N = self._of_kept_as_sums(grad_entropy_N).neg()
            softmax_coef_N = softmax_coef_N - entropy_coef_N * stats.mean_N
        return RowCoefs(
            self.target_N, self.ignored_N, softmax_coef_N, target_coef_N, entropy_coef_N=entropy_coef_N
        )

    def total_weight(self) -> Tensor | int:
        if self.class_weight_V is None:
            return self.V
        return self.class_weight_V.sum() if self.plan.agreement is None else self.weight_P.sum()

    @functools.cached_property
    def weight_P(self) -> Tensor:
        """Return the total weight of each part of a sharded head's classes."""
        options, agreement = self.plan.options, self.plan.agreement
        assert agreement is not None
        weight_p = torch.zeros(agreement.most_parts, dtype=self.plan.sum_dtype, device=self.device)
        for p, part in enumerate(options.shard.parts_of(self.own_classes)):
            if self.class_weight_V is None:
                weight_p[p] = part.stop - part.start
            else:
                weight_p[p] = self.class_weight_V[part].sum()
        return gather_parts(weight_p, agreement)()

    def _of_kept_as_sums(self, vector_N: Tensor) -> Tensor:
        return self.of_kept(vector_N).to(self.plan.sum_dtype).masked_fill(self.ignored_N, 0)

    def _target_coef_weight_N(self) -> Tensor:
        smoothing = self.plan.options.label_smoothing
        return self.target_weight_N * (1 - smoothing) if smoothing else self.target_weight_N

    @functools.cached_property
    def target_weight_N(self) -> Tensor:
        """Return the class weight of each row's target.

        The weight is 0 for ignored rows. It is NaN for a target that is no class; on the CPU such a
        target raises an error before.
        """
        if self.class_weight_V is None:
            weight_N = torch.ones(self.M, dtype=self.plan.sum_dtype, device=self.device)
        elif self.plan.agreement is not None:
            weight_N = self._weight_of_all_ranks()
        else:
            weight_N = self.class_weight_V[self.target_N]
        return weight_N.masked_fill_(self.invalid_target_N, torch.nan).masked_fill_(self.ignored_N, 0)

    def _weight_of_all_ranks(self) -> Tensor:
        """Return the class weight of each row's target, from the rank that has this class."""
        assert self.class_weight_V is not None
        assert self.plan.agreement is not None
        weight_N = torch.zeros(self.M, dtype=self.plan.sum_dtype, device=self.device)
        if self.own_classes:
            place_N = self.target_N - self.plan.options.first_class
            inside_N = (place_N >= 0) & (place_N < self.own_classes)
            own_N = self.class_weight_V[place_N.masked_fill(~inside_N, 0)]
            weight_N = own_N.masked_fill(~inside_N, 0)
        return self.plan.agreement.group.sum_(weight_N)()

    def empty_stats(self, kind: type[Stats]) -> Stats:
        """Return memory for the statistics that the call needs."""
        call_kind, smoothing = self.plan.call_kind, self.plan.options.label_smoothing

        probabilities, log_probs = call_kind.probabilities, call_kind.log_probs
        vectors = {"max_N": self.vector(), "sum_N": self.vector()}
        if probabilities:
            vectors |= {"soft_mass_N": self.vector(), "soft_nll_N": self.vector()}
        else:
            vectors["nll_N"] = self.vector()
            if smoothing > 0:
                vectors["smooth_nll_N"] = self.vector()
        if log_probs:
            vectors["mean_N"] = self.vector()
            vectors["argmax_N"] = torch.empty(self.M, dtype=torch.long, device=self.device)
        if issubclass(kind, ExcludedTargetStats):
            vectors["target_logit_N"] = self.vector()
        return kind(**vectors)

    def vector(self) -> Tensor:  # [M]
        """Return uninitialised memory in the dtype of the sums."""
        return torch.empty(self.M, dtype=self.plan.sum_dtype, device=self.device)


def mean_factor(denominator: Tensor, all_ignored: Tensor) -> Tensor:
    """Return 1 / denominator, or 1 if every row is ignored.

    In that case the gradients are 0, not NaN; the mean is NaN unless a normalizer is given.
    """
    return 1 / denominator.masked_fill(all_ignored, 1)


def as_vector(vector: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the vector in this dtype, contiguous."""
    return None if vector is None else vector.to(dtype).contiguous()
