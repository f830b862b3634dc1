"""Run the CPU's exponentials engine if the classes of a row are on several ranks.

exponentials/sharded_engine.py explains the method.

Shapes: N tokens, D features, V classes of this rank; C tokens of a chunk.
"""

import torch
from torch import Tensor

from lowtide.core.bfloat16_units import gemm
from lowtide.core.elementwise import scaled
from lowtide.ops.linear_cross_entropy.engines import excluded_part_stats, sharded_walk
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.engine import CpuExponentialsEngine, OfTokens
from lowtide.ops.linear_cross_entropy.engines.excluded_part_stats import (
    begin_merge,
    first_references,
    no_classes,
    own_places,
)
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    ExcludedTargetStats,
    RowCoefs,
    excluded_coefs,
)
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import choose_accumulator
from lowtide.ops.linear_cross_entropy.planning.memory_model import SAMPLED_CLASSES


class ShardedCpuExponentialsEngine(CpuExponentialsEngine):
    """Walk over the chunks of a call whose classes are divided over ranks."""

    def walk_tokens(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, take_stats: bool
    ) -> OfTokens:
        plan, (operand,), (dw,), db = self.plan, self.operands, gradients.weights, gradients.bias
        coefs = own_places(coefs, self.first_class, self.V)
        sum = choose_accumulator(plan, 0, dw, gemm.multiply_transposed) if self.V else None
        (summed,) = sharded_walk.summed_rows(self, gradients)
        needs_grad = any(each is not None for each in (summed, sum, db))
        row_scale_M = torch.empty_like(coefs.target_coef_N)
        target_weight_coef_M = torch.empty_like(row_scale_M)
        in_turn = [*sharded_walk.chunks_of(self)]
        held = in_turn[: 1 + take_stats] if needs_grad and self.V else []
        buffers = [self.buffer(in_turn[0].stop, self.V, dtype=plan.compute_dtype) for _ in held]

        def begin(place: int, rows: slice, tokens: list[Tensor]) -> sharded_walk.Begun:
            e_CV = buffers[place % len(buffers)][: rows.stop - rows.start] if buffers else None
            return self._begin(coefs[rows], stats[rows], tokens[0], e_CV, take_stats)

        for rows, (x_CD,), e_CV, own_scale_C in sharded_walk.merged_chunks(self, in_turn, begin):
            row, stat = coefs[rows], stats[rows]
            own_C = row.target_N >= 0
            c_C, h_C = excluded_coefs(row, stat, stat.target_logit_N, take_nll=False)
            # A chunk has ignored rows only if each rank has its own tokens.
            c_C.masked_fill_(row.ignored_N, 0)
            h_C.masked_fill_(row.ignored_N | ~own_C, 0)
            row_scale_M[rows], target_weight_coef_M[rows] = c_C, h_C
            if own_scale_C is not None:
                c_C = c_C * own_scale_C
            if summed is not None:
                dx_CD = summed.memory(rows)
                if e_CV is None:
                    dx_CD.zero_()
                else:
                    gemm.multiply(dx_CD, e_CV, operand.weight_VD, add=False)
                    dx_CD.mul_(c_C[:, None]).add_(self._target_weights(row).mul_(h_C[:, None]))
                summed.begin_sum(dx_CD, rows)
            if e_CV is None:
                continue
            x_CD = x_CD.contiguous()
            if sum is not None:
                self._add_rows(sum, e_CV, x_CD, row.target_N, c_C, h_C, first=rows.start == 0)
            if db is not None:
                self._add_bias(db.tensor, e_CV, row.target_N.clamp(min=0), c_C, h_C)
        if summed is not None:
            summed.finish()
        if sum is not None and self.M:
            sum.finish()
        return row_scale_M, target_weight_coef_M, None

    def walk_classes(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, of_tokens: OfTokens
    ) -> None:
        super().walk_classes(own_places(coefs, self.first_class, self.V), stats, gradients, of_tokens)

    # Steps of the walk.

    def _begin(
        self, row: RowCoefs, stat: ExcludedTargetStats, x_CD: Tensor, e_CV: Tensor | None, take_stats: bool
    ) -> sharded_walk.Begun:
        """Compute a chunk's exponentials; if `take_stats`, begin to gather its statistics."""
        agreement = self.plan.agreement
        assert agreement is not None
        if not take_stats:
            if e_CV is not None:
                self._exponentials(x_CD, e_CV, row.target_N, stat.max_N)
            return e_CV, None
        if self.V:
            product_C = scaled(x_CD, self._target_weights(row)).sum(1)
            logit_C, _ = self.target_logits(product_C, row.target_N.clamp(min=0))
            part = stat.each(torch.empty_like)
            references_C = first_references(logit_C, self._sampled_maxima(x_CD), row)
            self._take_stats(x_CD, e_CV, row.target_N, references_C, part)
        else:
            logit_C, part = self.buffer(x_CD.shape[0]), no_classes(stat)
        merge = begin_merge(
            excluded_part_stats, stat, part, logit_C, row, agreement, first_class=self.first_class
        )
        return e_CV, merge

    def _target_weights(self, row: RowCoefs) -> Tensor:  # [C, D]
        """Return the weight of each row's target, or of class 0 if another rank has the target."""
        return self.operands[0].weight_VD[row.target_N.clamp(min=0)].to(self.plan.sum_dtype)

    def _sampled_maxima(self, x_CD: Tensor) -> Tensor:  # [C]
        """Return each row's largest logit among a few classes, spread over those of this rank."""
        sampled = slice(0, self.V, -(-self.V // SAMPLED_CLASSES))
        none_C = torch.full((x_CD.shape[0],), -1)
        return self._exponentials(x_CD, None, none_C, self.buffer(x_CD.shape[0]).zero_(), sampled)[1]
