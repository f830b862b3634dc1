"""Run the GEMM of exponentials on a chunk: its E, its rows' statistics, with class blocks its dX.

engine.py has the formulas: each row has a reference r, and the sum S of its exponentials. A row
where r = z_t is too far below the largest logit shows it in S; its tiles are computed again.

Shapes: C tokens of a chunk, B classes of a block, V classes.
"""

import torch
from torch import Tensor

from lowtide.ops.linear_cross_entropy.engines.exponentials import row_log_probs
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm.launch import Exponentials
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import (
    add_partials,
    mark_infinite,
    replace_references,
)
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import ExcludedTargetStats, RowCoefs
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine


class ExponentialsStatistics(LossEngine):
    """Compute a chunk's exponentials, and what the gradients need to know of each of its rows.

    It is abstract; ExponentialsEngine is the engine.
    """

    stats_kind = ExcludedTargetStats

    def _target_logits(
        self,
        linear: list[LinearTerm],
        chunks: list[Tensor],
        row: RowCoefs,
        stat: ExcludedTargetStats,
        marks: Tensor | None,
        counted: CountedChunk,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the targets' products, logits and slopes.

        With marks, which are cleared, the statistics get the logits and the first references too.
        """
        take_stats = marks is not None
        (first, *others), (x_CD, *more) = linear, chunks
        # Then products are logits, and one launch writes all of this.
        at_once = take_stats and not others and self.transform.is_identity
        raw_C = stat.target_logit_N if at_once else self.buffer(x_CD.shape[0])
        first.target_logits(
            x_CD,
            row.target_N,
            raw_C,
            counted,
            ignored_C=row.ignored_N if at_once else None,
            reference_C=stat.max_N if at_once else None,
            marks=marks,
        )
        for each, x_CD in zip(others, more):
            part_C = torch.empty_like(raw_C)
            each.target_logits(x_CD, row.target_N, part_C, counted)
            raw_C += part_C
        logit_C, slope_C = self.target_logits(raw_C, row.target_N)
        if take_stats and not at_once:
            stat.target_logit_N.copy_(logit_C)
            stat.max_N.copy_(logit_C).masked_fill_(row.ignored_N, torch.inf)
        return raw_C, logit_C, slope_C

    def _tiles(
        self,
        chunks: list[Tensor],
        row: RowCoefs,
        stat: ExcludedTargetStats,
        *,
        out_CB: Tensor | None,
        classes: slice,
        counted: CountedChunk = ALL,
        factor_C: Tensor | None = None,
    ) -> Exponentials:
        """Return the tiles of a chunk and a block of classes, ready to run."""
        return Exponentials(
            *((x_CD, operand.weight(classes)) for x_CD, operand in zip(chunks, self.operands)),
            reference_C=stat.max_N,
            target_C=row.target_N,
            out_CB=out_CB,
            transform=self.transform.of(classes),
            softmax_coef_C=row.softmax_coef_N,
            entropy_coef_C=row.entropy_coef_N,
            factor_C=factor_C,
            first_class=classes.start,
            counted=counted,
        )

    def _run(
        self,
        tiles: list[Exponentials],
        chunks: list[Tensor],
        row: RowCoefs,
        stat: ExcludedTargetStats,
        logit_C: Tensor,
        linear: list[LinearTerm],
        marks: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Compute E, and with marks the row statistics that are wanted.

        With blocks of classes this computes the products that become dX too. r is replaced by the
        largest logit in rows where the target's is too far below it; their tiles are marked. Return
        the grad_dot_logit of all classes but the target's, or None if it is not wanted; and partial
        sums, of which those in marked tiles are still to be added up.
        """
        if marks is not None and self.plan.call_kind.log_probs:
            (whole,) = tiles
            self._run_log_probs(whole, row, stat, logit_C, marks)
            return None, None

        grad_dot_logit_C = None if stat.grad_dot_logit_N is None else torch.empty_like(logit_C)
        if marks is None:
            self._run_blocks(tiles, linear, grad_dot_logit_C, None)
            return grad_dot_logit_C, None
        sums_TC = maxima = tiles[0].partials()
        self._run_blocks(tiles, linear, grad_dot_logit_C, sums_TC, guarded=False)
        # If no row is marked, the kernels below return at once.
        add_partials(sums_TC, stat.sum_N, marks=marks, mark=True, counted=tiles[0].counted)
        # This run stores no E. So take all classes at once.
        whole = tiles[0]
        if len(tiles) > 1:
            whole = self._tiles(
                chunks, row, stat, out_CB=None, classes=slice(0, self.V), counted=tiles[0].counted
            )
            maxima = whole.partials()
        whole.run(maxima=maxima, marks=marks, store=False)
        replace_references(maxima, stat.sum_N, row.ignored_N, stat.max_N, marks)
        self._run_blocks(tiles, linear, grad_dot_logit_C, sums_TC, marks=marks)
        return grad_dot_logit_C, sums_TC

    def _run_blocks(
        self,
        tiles: list[Exponentials],
        linear: list[LinearTerm],
        grad_dot_logit_C: Tensor | None,
        sums_TC: Tensor | None,
        *,
        marks: Tensor | None = None,
        guarded: bool = True,
    ) -> None:
        """Run each block of classes in turn, and write E's partial sums if they have memory."""
        # Each block adds to the partial sums of the one before. The first block is the largest.
        grad_dot_logits = None if grad_dot_logit_C is None else tiles[0].partials()
        for each in tiles:
            each.run(sums=sums_TC, grad_dot_logits=grad_dot_logits, marks=marks, guarded=guarded)
            for term in linear if len(tiles) > 1 else ():
                term.add_block(each.exp_CB, each.classes, marks)
        if grad_dot_logits is not None and grad_dot_logit_C is not None:
            add_partials(grad_dot_logits, grad_dot_logit_C, marks=marks, counted=tiles[0].counted)

    def _run_log_probs(
        self, tiles: Exponentials, row: RowCoefs, stat: ExcludedTargetStats, logit_C: Tensor, marks: Tensor
    ) -> None:
        """Compute what log-probabilities and entropies need, with r as the largest logit.

        An entropy is a sum of differences from r. Each half tile has its sums relative to its own
        largest logit.
        """
        found = {name: tiles.partials() for name in ("sums", "means", "maxima")}
        found["places"] = tiles.partials(torch.int32)
        tiles.run(**found, guarded=False)
        mark_infinite(found["maxima"], row.ignored_N, marks)
        tiles.run(maxima=found["maxima"], places=found["places"], marks=marks)
        row_log_probs.combine(found, row, stat, logit_C, tiles.counted)

    def _raw_smooth(self, linear: list[LinearTerm], chunks: list[Tensor]) -> Tensor:  # [C]
        """Return sum_v w_v u_v of each row."""
        raw_C, *others = (each.sum_of_logits(x_CD) for each, x_CD in zip(linear, chunks))
        for part_C in others:
            raw_C += part_C
        bias_V = self.transform.bias_V
        if bias_V is not None:
            raw_C = raw_C + (bias_V if self.class_weight_V is None else bias_V * self.class_weight_V).sum()
        return raw_C
