"""Run the exponentials engine: loss and gradients without stored logits, bfloat16 on Hopper.

The logits never reach memory. The GEMM U = X W^T applies bias, scale and soft cap in its epilogue
and stores E = exp(z - r) in bfloat16. r_i is a reference near the row's largest logit. In the
target's column E is 0. The row's sum S of E is taken in float32 before the rounding. The gradient
needs nothing else, since in each row

    G = c E + h [v = t] - smoothing_coef w
    where c = softmax_coef / (e + S),   h = c e - target_coef,   e = exp(z_t - r)

(row_math.py defines w and the coefficients; c is `row_scale`, h `target_weight_coef`). Therefore

    dX = c (E W) + h W_t - smoothing_coef (w W)
    dW = E^T (c X) + (the rows h X, added at their targets) - w (smoothing_coef X)

So c scales the rows of products, not logits. The target's column, where p - 1 would lose its digits
in bfloat16, is exact in float32. r = z_t makes loss = log(1 + S) and h = -target_coef S / (1 + S):
there is no difference of large numbers, even for a token with p = 1 - 1e-9. With a soft cap or an
entropy's gradient, each p_v has a further factor. E is multiplied by it as it is stored, after S
has been summed.

bfloat16 has the range of float32, so any r within 40 of the largest logit works. z_t nearly always
does. A row where it does not shows it in S; then its tiles are computed again with r = max z. This
is decided on the device, without asking the host.

If dW is formed class by class ("class_blocks"), there are two sweeps, both by chunks of tokens. The
first computes what belongs to tokens; the second, which knows c, what belongs to classes, a block
of them at a time. In the first, E lies in dW's memory. That of the last tokens, times c, stays
there, and the second sweep computes E of the other tokens again (memory.py). Where dW's memory is
too small for a chunk and all classes, these come in blocks in the first sweep too. Then dX is
summed over the blocks, and its marked row tiles are computed again.

Otherwise, if the plan skips ignored rows, rows are taken in an order in which these come last, and
the kernels end after those that count (gemm/counted_rows.py). Vectors of rows are then in that
order, except h, which is read with the rows of X and dX.

The idea of scaled exponentials comes from quack-kernels (github.com/Dao-AILab/quack), which has
offsets per tile, applied in the GEMMs.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block, P blocks.
"""

import torch
from torch import Tensor

from lowtide.core.matmul import blocks, product, sum_of_products
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm
from lowtide.ops.linear_cross_entropy.engines.exponentials.memory import ExponentialsMemory
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import marks_memory
from lowtide.ops.linear_cross_entropy.engines.exponentials.row_coefficients import coefficients
from lowtide.ops.linear_cross_entropy.engines.exponentials.row_statistics import ExponentialsStatistics
from lowtide.ops.linear_cross_entropy.engines.exponentials.target_order import sorted_targets
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    ExcludedTargetStats,
    RowCoefs,
)
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import row_kernels, target_rows
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.accumulators import TritonFloatSum
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import choose_accumulator
from lowtide.ops.linear_cross_entropy.planning.byte_counts import exponentials_stride

Targets = tuple[Tensor, Tensor]
"""Target classes in order, with ignored rows last under a class of their own; and their rows."""

OfTokens = tuple[list[LinearTerm], Tensor, Tensor]
"""The linear terms, and c and h of each row."""


class ExponentialsEngine(ExponentialsStatistics):
    """Walk over one call's chunks with exponentials in place of logits, on a Hopper GPU."""

    def walk_tokens(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, take_stats: bool
    ) -> OfTokens:
        plan, smoothing = self.plan, coefs.smoothing_coef_N is not None
        class_blocks = plan.weight_gradient == "class_blocks"
        linear = self._linear_terms(gradients, smoothing=smoothing)
        db = None if class_blocks else gradients.bias
        row_scale_N = torch.empty_like(coefs.target_coef_N)
        target_weight_coef_N = torch.empty_like(row_scale_N)
        sums = any(each.sum is not None for each in linear)
        needs_grad = sums or any(each is not None for each in (*gradients.inputs, db, gradients.scale))
        stored = self._stored_rows(gradients)
        memory = self._memory(gradients, plan.rows) if needs_grad or stored.start < self.M else None
        order = self._sorted_targets(plan.rows) if db is not None or sums else None
        # A GEMM of cuBLAS reads all rows, and a NaN times 0 would be NaN.
        clears = plan.skips_ignored and (db is not None or any(each.reads_all_rows for each in linear))
        in_turn = [*blocks(stored.start, plan.rows), *blocks(self.M, plan.rows, first=stored.start)]
        for rows in in_turn:
            row, stat, counted = coefs[rows], stats[rows], self.counted_chunk(rows)
            chunks = [each.rows(rows, counted) for each in linear]
            marks = marks_memory(row.target_N) if take_stats else None
            raw_C, logit_C, slope_C = self._target_logits(linear, chunks, row, stat, marks, counted)
            stores = rows.start >= stored.start and memory is not None
            tiles = [
                self._tiles(chunks, row, stat, out_CB=exp_CB, classes=classes, counted=counted)
                for classes, exp_CB in self._blocks_of(rows, stored, memory if needs_grad or stores else None)
            ]
            grad_dot_logit_C = sums_TC = None
            if needs_grad or take_stats:
                grad_dot_logit_C, sums_TC = self._run(
                    tiles, chunks, row, stat, logit_C, [] if stores else linear, marks
                )
            row_scale_C = row_scale_N[rows]
            coefficients(
                row,
                stat,
                logit_C,
                slope_C,
                row_scale_C,
                counted.of(target_weight_coef_N, rows),
                counted=counted,
                take_nll=take_stats,
                partials_TC=sums_TC,
                marks=marks,
            )
            del sums_TC  # free them before the products are made
            raw_smooth_C = self._raw_smooth(linear, chunks) if smoothing else None
            if take_stats and raw_smooth_C is not None:
                self.take_smooth_nll(stat, logit_C, raw_smooth_C)
            if not needs_grad and not class_blocks:
                # Copies may be among them; free them before the next ones are made.
                del chunks, tiles
                continue
            if grad_dot_logit_C is not None:
                target_weight_coef_C = target_weight_coef_N[rows if counted.row_C is None else counted.row_C]
                grad_dot_logit_C = grad_dot_logit_C * row_scale_C + target_weight_coef_C * raw_C
                if raw_smooth_C is not None:
                    grad_dot_logit_C -= row.smoothing_coef_N * raw_smooth_C
                stat.grad_dot_logit_N.copy_(grad_dot_logit_C)
            targets = None if order is None else (order[0][rows], order[1][rows])
            if clears:
                row_kernels.clear_rows(tiles[0].exp_CB, counted._replace(row_C=None))
            first, last = rows.start == 0, rows.stop == self.M
            for each, x_CD in zip(linear, chunks):
                target_rows = None
                if targets is not None:
                    target_rows = each.operand.input, target_weight_coef_N, *targets
                exp_CB = tiles[0].exp_CB
                each.add_chunk(
                    exp_CB, x_CD, row, row_scale_C, rows, target_rows, counted, first=first, last=last
                )
                each.finish_rows(tiles, row, row_scale_C, rows, target_weight_coef_N, counted)
            if stores:
                for each_block in tiles:
                    row_kernels.scale_rows(each_block.exp_CB, row_scale_C, None, each_block.exp_CB)
            if db is not None and targets is not None:
                db.tensor.add_(sum_of_products(row_scale_C[None], tiles[0].exp_CB)[0])
                self._add_bias_targets(db.tensor, target_weight_coef_N, targets)
            del chunks, x_CD, tiles
        for each in linear:
            each.clear_ignored_rows(self.counted_chunk(slice(0, self.M)))
        if db is not None:
            self._subtract_bias_smoothing(db.tensor, coefs)
        return linear, row_scale_N, target_weight_coef_N

    def _linear_terms(self, gradients: Gradients, *, smoothing: bool) -> list[LinearTerm]:
        """Return the terms of the head; with class blocks they form no dW."""
        plan, linear, class_weight_V = self.plan, [], self.class_weight_V
        for k, (operand, dx, dw) in enumerate(zip(self.operands, gradients.inputs, gradients.weights)):
            sum = None
            if plan.weight_gradient != "class_blocks":
                sum = choose_accumulator(plan, k, dw)
            term = LinearTerm(operand, dx, sum, plan, class_weight_V, place=k, smoothing=smoothing)
            linear.append(term)
        return linear

    def walk_classes(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, of_tokens: OfTokens
    ) -> None:
        """Compute dW class by class, when all row statistics are known.

        The kernel stores c E rounded once, so X is multiplied by it without scaling. So is c E of
        the tokens that are stored, whose E has been rounded before.
        """
        (linear, row_scale_N, target_weight_coef_N), first_dw = of_tokens, gradients.weights[0]
        assert first_dw is not None
        plan, operand, db = self.plan, self.operands[0], gradients.bias
        targets = self._sorted_targets(self.M)
        one_1C = torch.ones(1, self.M if db is not None else 0, dtype=plan.sum_dtype, device=self.device)
        first_V = target_rows.first_places(targets[0], self.V)
        sum_BD = self.buffer(plan.block_classes, operand.D)
        memory, stored = self._memory(gradients, plan.rows), self._stored_rows(gradients)
        again = ExponentialsMemory(self._exponentials_buffer(plan.block_rows, plan.block_classes), self.V)
        at_once = plan.rows if any(plan.access.copies_rows) else max(1, self.M - stored.start)
        in_turn = [*blocks(stored.start, plan.block_rows), *blocks(self.M, at_once, first=stored.start)]
        chunks = [(rows, coefs[rows], stats[rows], row_scale_N[rows]) for rows in in_turn]
        for classes in blocks(self.V, plan.block_classes):
            block_BD = sum_BD[: classes.stop - classes.start]
            sums = [block_BD, *(dw and dw.tensor[classes] for dw in gradients.weights[1:])]
            for rows, row, stat, row_scale_C in chunks:
                x_chunks = [each.rows(rows) for each in self.operands]
                if rows.start >= stored.start:
                    g_CB = memory.stored(_shifted(rows, -stored.start), classes)
                else:
                    g_CB = again.chunk(rows.stop - rows.start, classes.stop - classes.start)
                    self._tiles(x_chunks, row, stat, out_CB=g_CB, classes=classes, factor_C=row_scale_C).run()
                for sum, x_CD in zip(sums, x_chunks):
                    if sum is not None:
                        product(sum, g_CB.t(), x_CD, add=rows.start > 0)
                del x_chunks, x_CD
                if db is not None:
                    # torch.sum would allocate memory of unknown size.
                    db.tensor[classes] += sum_of_products(one_1C[:, : g_CB.shape[0]], g_CB)[0]
            target_rows.round_block(
                first_dw.tensor,
                block_BD,
                first_dw.applied,
                operand.input,
                target_weight_coef_N,
                *targets,
                first_V,
                self.class_weight_V,
                linear[0].smoothing_row_D,
                first_class=classes.start,
            )
        for each, dw in zip(linear[1:], gradients.weights[1:]):
            if dw is not None:
                each.finish_products(TritonFloatSum(dw.tensor), target_weight_coef_N, targets)
        if db is not None:
            self._add_bias_targets(db.tensor, target_weight_coef_N, targets)
            self._subtract_bias_smoothing(db.tensor, coefs)

    def _sorted_targets(self, rows: int) -> Targets:
        """Sort the targets of each chunk of `rows` rows."""
        class_N, order_N = sorted_targets(self.rows.target_N, self.rows.ignored_N, self.V, rows)
        return class_N, order_N if self.kept_rows is None else self.kept_rows[order_N]

    def _add_bias_targets(self, sum_V: Tensor, target_weight_coef_N: Tensor, targets: Targets) -> None:
        """Add h of each row to the bias gradient of its target."""
        one_N1 = torch.ones(self.M, 1, dtype=self.plan.sum_dtype, device=self.device)
        target_rows.add_target_rows(sum_V[:, None], None, one_N1, target_weight_coef_N, *targets)

    def _subtract_bias_smoothing(self, sum_V: Tensor, coefs: RowCoefs) -> None:
        """Subtract the smoothing term from the bias gradient."""
        if coefs.smoothing_coef_N is not None:
            smoothing_coef = coefs.smoothing_coef_N.sum()
            sum_V.sub_(
                smoothing_coef if self.class_weight_V is None else self.class_weight_V * smoothing_coef
            )

    # Buffers.

    def _memory(self, gradients: Gradients, rows: int) -> ExponentialsMemory:
        """Return memory for the exponentials of a chunk of so many rows."""
        first_dw = gradients.weights[0]
        if self.plan.weight_gradient == "class_blocks" and first_dw is not None:
            flat = first_dw.tensor.view(-1).view(self.plan.compute_dtype)
            # One class has less in the interpreter, whose exponentials are wider.
            if flat.shape[0] >= exponentials_stride(self.V):
                return ExponentialsMemory(flat, self.V)
        return ExponentialsMemory(self._exponentials_buffer(rows, self.V), self.V)

    def _stored_rows(self, gradients: Gradients) -> slice:
        """Return the tokens whose exponentials stay in the memory of dW: the last ones."""
        stores = self.plan.weight_gradient == "class_blocks" and gradients.weights[0] is not None
        return slice(self.M - min(self.plan.stored_rows, self.M) if stores else self.M, self.M)

    def _blocks_of(
        self, rows: slice, stored: slice, memory: ExponentialsMemory | None
    ) -> list[tuple[slice, Tensor | None]]:
        """Return the blocks of classes of a chunk, and where its exponentials are stored, if so."""
        if memory is None:
            return [(slice(0, self.V), None)]
        if rows.start >= stored.start:
            own = _shifted(rows, -stored.start)
            return [(each, memory.stored(own, each)) for each in blocks(self.V, self.plan.block_classes)]
        C = rows.stop - rows.start
        return [
            (each, memory.chunk(C, each.stop - each.start))
            for each in blocks(self.V, self.plan.chunk_classes)
        ]

    def _exponentials_buffer(self, rows: int, columns: int) -> Tensor:
        return self.buffer(rows * exponentials_stride(columns), dtype=self.plan.compute_dtype)


def _shifted(rows: slice, by: int) -> slice:
    return slice(rows.start + by, rows.stop + by)
