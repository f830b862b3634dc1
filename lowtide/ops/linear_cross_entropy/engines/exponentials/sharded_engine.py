"""Run the exponentials engine where the classes of a row are on several ranks.

A rank with a row's target takes its logit as reference, as one process does. Another rank takes the
largest logit of a few of its classes, so that no rank waits for the target's logit before its GEMM.
excluded_part_stats.py merges the statistics of all ranks, and says what the merged ones mean.

Each chunk takes all classes of this rank at a time. Statistics only scale the rows of dX, so its
GEMM runs while they are gathered. dX is computed before dW, so that it is summed over the ranks
while the GEMM of dW runs.

Shapes: N tokens, D features, V classes of this rank; C tokens of a chunk.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lowtide.core.matmul import product, product_of_rows, sum_of_products
from lowtide.ops.linear_cross_entropy.engines import (
    excluded_part_stats,
    excluded_part_stats_triton,
    sharded_walk,
)
from lowtide.ops.linear_cross_entropy.engines.excluded_part_stats import begin_merge, no_classes, own_places
from lowtide.ops.linear_cross_entropy.engines.exponentials.engine import ExponentialsEngine, OfTokens, Targets
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm
from lowtide.ops.linear_cross_entropy.engines.exponentials.memory import ExponentialsMemory
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import add_partials, marks_memory
from lowtide.ops.linear_cross_entropy.engines.exponentials.row_coefficients import coefficients
from lowtide.ops.linear_cross_entropy.engines.exponentials.target_order import sorted_targets
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.token_order import SummedRows
from lowtide.ops.linear_cross_entropy.planning.memory_model import SAMPLED_CLASSES


@dataclass(slots=True)
class _Chunk:
    """Hold the results of a chunk that are computed before the statistics of all ranks arrive."""

    exp_CV: Tensor | None
    raw_C: Tensor
    """The targets' products plus bias; arbitrary where another rank has the target."""
    slope_C: Tensor | None
    raw_smooth_C: Tensor | None
    grad_dot_logit_C: Tensor | None


class ShardedExponentialsEngine(ExponentialsEngine):
    """Walk over the chunks of one call whose classes are divided over the ranks."""

    def walk_tokens(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, take_stats: bool
    ) -> OfTokens:
        plan = self.plan
        coefs = own_places(coefs, self.first_class, self.V)
        smoothing = coefs.smoothing_coef_N is not None
        linear = self._linear_terms(gradients, smoothing=smoothing)
        summed = sharded_walk.summed_rows(self, gradients)
        db = None if plan.weight_gradient == "class_blocks" else gradients.bias
        sums = any(each.sum is not None for each in linear)
        needs_grad = sums or any(each is not None for each in (*summed, db, gradients.scale))
        row_scale_N = torch.empty_like(coefs.target_coef_N)
        target_weight_coef_N = torch.empty_like(row_scale_N)
        of_tokens = linear, row_scale_N, target_weight_coef_N
        in_turn = [*sharded_walk.chunks_of(self)]
        if not in_turn:
            return of_tokens
        rows = in_turn[0].stop
        targets = self._sorted_targets(rows) if self.V and (sums or db is not None) else None
        memory = None
        if needs_grad and self.V:
            memory = ExponentialsMemory(self._exponentials_buffer(rows, self.V), self.V)
        for rows, tokens in sharded_walk.tokens_ahead(self, in_turn):
            row, stat = coefs[rows], stats[rows]
            chunk, merge = self._begin(row, stat, linear, tokens, memory, take_stats, smoothing)
            products = [self._input_product(term, dx, rows, chunk) for term, dx in zip(linear, summed)]
            own_scale_C = None if merge is None else merge()
            row_scale_C, target_weight_coef_C = row_scale_N[rows], target_weight_coef_N[rows]
            of_rows = stat.target_logit_N, chunk.slope_C, row_scale_C, target_weight_coef_C
            coefficients(row, stat, *of_rows, take_nll=False, partials_TC=None, marks=None)
            if own_scale_C is not None:
                row_scale_C = row_scale_C * own_scale_C
            if stat.grad_dot_logit_N is not None:
                self._finish_grad_dot_logit(chunk, row, stat, row_scale_C, target_weight_coef_C)
            of_gradient = row, row_scale_C, target_weight_coef_C
            for term, dx, product_CD in zip(linear, summed, products):
                if dx is not None:
                    if chunk.exp_CV is not None:
                        term.rows_of_product(product_CD, product_CD, *of_gradient)
                    dx.begin_sum(product_CD, rows)
            del products, product_CD  # free both, since they are summed
            sorted_C = None if targets is None else (targets[0][rows], targets[1][rows])
            last = rows.stop == self.M
            for each, x_CD in zip(linear, tokens):
                target_rows = None
                if sorted_C is not None:
                    target_rows = x_CD, target_weight_coef_C, sorted_C[0], sorted_C[1] - rows.start
                of_chunk = chunk.exp_CV, x_CD, row, row_scale_C, slice(0, x_CD.shape[0])
                each.add_chunk(*of_chunk, target_rows, first=rows.start == 0, last=last)
            if db is not None and sorted_C is not None:
                db.tensor.add_(sum_of_products(row_scale_C[None], chunk.exp_CV)[0])
                self._add_bias_targets(db.tensor, target_weight_coef_N, sorted_C)
            del tokens, chunk, x_CD, target_rows, of_chunk  # free them before the next chunk
        for dx in summed:
            if dx is not None:
                dx.finish()
        if db is not None:
            self._subtract_bias_smoothing(db.tensor, coefs)
        return of_tokens

    def walk_classes(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, of_tokens: OfTokens
    ) -> None:
        if self.V:
            super().walk_classes(own_places(coefs, self.first_class, self.V), stats, gradients, of_tokens)

    # Steps of the walk.

    def _begin(
        self,
        row: RowCoefs,
        stat: ExcludedTargetStats,
        linear: list[LinearTerm],
        tokens: list[Tensor],
        memory: ExponentialsMemory | None,
        take_stats: bool,
        smoothing: bool,
    ) -> sharded_walk.Begun:
        """Compute a chunk's exponentials, and begin to gather its statistics if asked to."""
        agreement = self.plan.agreement
        assert agreement is not None
        C, marks = row.target_N.shape[0], marks_memory(row.target_N) if take_stats else None
        exp_CV = None if memory is None else memory.chunk(C, self.V)
        part, grad_dot_logit_C = stat, None
        raw_smooth_C = self._raw_smooth(linear, tokens) if smoothing else None
        if self.V == 0:
            raw_C = logit_C = self.buffer(C).zero_()
            slope_C = None
            if take_stats:
                part = no_classes(stat)
        else:
            raw_C, logit_C, slope_C = self._own_target_logits(linear, tokens, row, marks)
            if take_stats:
                sampled_C = self._sampled_maxima(tokens)
                references_C = excluded_part_stats_triton.first_references(logit_C, sampled_C, row)
                part = replace(stat.each(torch.empty_like), max_N=references_C)
                part = replace(part, grad_dot_logit_N=stat.grad_dot_logit_N)
            tiles = [self._tiles(tokens, row, part, out_CB=exp_CV, classes=slice(0, self.V))]
            if take_stats or exp_CV is not None:
                grad_dot_logit_C, sums_TC = self._run(tiles, tokens, row, part, logit_C, [], marks)
                if sums_TC is not None:
                    add_partials(sums_TC, part.sum_N, marks=marks)
        chunk = _Chunk(exp_CV, raw_C, slope_C, raw_smooth_C, grad_dot_logit_C)
        if not take_stats:
            return chunk, None
        smooth_logit_C = raw_smooth_C
        if smooth_logit_C is not None and self.transform.scale is not None:
            smooth_logit_C = smooth_logit_C * self.transform.scale
        return chunk, begin_merge(
            excluded_part_stats_triton if stat.mean_N is None else excluded_part_stats,
            stat,
            part,
            logit_C,
            row,
            agreement,
            first_class=self.first_class,
            smooth_logit_C=smooth_logit_C,
            total_weight=self.rows.total_weight() if smoothing else 0,
        )

    def _own_target_logits(
        self, linear: list[LinearTerm], tokens: list[Tensor], row: RowCoefs, marks: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the targets' products, logits and slopes, and clear the marks.

        In rows whose target is on another rank, they are those of some other class.
        """
        raw_C = self.buffer(row.target_N.shape[0])
        for k, (each, x_CD) in enumerate(zip(linear, tokens)):
            part_C = raw_C if k == 0 else torch.empty_like(raw_C)
            each.target_logits(x_CD, row.target_N, part_C, ALL, marks=marks)
            if k:
                raw_C += part_C
        return raw_C, *self.target_logits(raw_C, row.target_N.clamp(min=0))

    def _sampled_maxima(self, tokens: list[Tensor]) -> Tensor:  # [C]
        """Return the largest logit of a few classes, spread evenly over this rank's classes."""
        sampled = slice(0, self.V, -(-self.V // SAMPLED_CLASSES))
        u_CB = self.buffer(tokens[0].shape[0], len(range(*sampled.indices(self.V))))
        for k, (operand, x_CD) in enumerate(zip(self.operands, tokens)):
            weight_BD = operand.weight_VD[sampled].to(x_CD.dtype)
            product(u_CB, x_CD, weight_BD.t(), add=k > 0)
        transform = self.transform.of(sampled)
        if transform.bias_V is not None:
            u_CB += transform.bias_V
        return transform.apply(u_CB, in_place=True, sloped=False)[0].amax(1)

    def _finish_grad_dot_logit(
        self,
        chunk: _Chunk,
        row: RowCoefs,
        stat: ExcludedTargetStats,
        row_scale_C: Tensor,
        target_weight_coef_C: Tensor,
    ) -> None:
        """Write the sum over this rank's classes of gradient times product."""
        found_C = stat.grad_dot_logit_N
        torch.mul(target_weight_coef_C, chunk.raw_C.masked_fill(row.target_N < 0, 0), out=found_C)
        if chunk.grad_dot_logit_C is not None:
            found_C += chunk.grad_dot_logit_C * row_scale_C
        if chunk.raw_smooth_C is not None:
            found_C -= row.smoothing_coef_N * chunk.raw_smooth_C

    def _input_product(
        self, term: LinearTerm, dx: SummedRows | None, rows: slice, chunk: _Chunk
    ) -> Tensor | None:
        """Return the product of the chunk's rows of dX, in the memory where ranks sum it."""
        if dx is None:
            return None
        product_CD = dx.memory(rows)
        if chunk.exp_CV is None:
            return product_CD.zero_()
        product_of_rows(product_CD, chunk.exp_CV, term.operand.weight(slice(0, self.V)))
        return product_CD

    def _sorted_targets(self, rows: int) -> Targets:
        """Sort the targets of each chunk; those on other ranks come last, like ignored ones."""
        of_rows = self.rows.target_N, self.rows.ignored_N
        return sorted_targets(*of_rows, self.V, rows, first_class=self.first_class)
