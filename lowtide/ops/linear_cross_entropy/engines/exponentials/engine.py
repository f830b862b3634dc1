"""Run the exponentials engine: loss and gradients without stored logits, bfloat16 on Hopper.

The logits never reach memory. The GEMM U = X W^T applies bias, scale and soft cap in its epilogue
and stores E = exp(z - r) in bfloat16. r_i is a reference near the row's largest logit. In the
target's column E is 0. The row's sum S of E is taken in float32 before the rounding. The gradient
needs nothing else, since in each row

    G = c E + h [v = t] - spread w,   c = pull / (e + S),   h = c e - hit,   e = exp(z_t - r)

(softmax_torch.py defines pull, hit, spread and w), and therefore

    dX = c (E W) + h W_t - spread (w W)
    dW = E^T (c X) + (the rows h X, added at their targets) - w (spread X)

So c scales the rows of products, not logits. The target's column, where p - 1 would lose its digits
in bfloat16, is exact in float32. r = z_t makes loss = log(1 + S) and h = -hit S / (1 + S): there is
no difference of large numbers, even for a token with p = 1 - 1e-9. With a soft cap or an entropy's
gradient, each p_v has a further factor. E is multiplied by it as it is stored, after S has been
summed.

bfloat16 has the range of float32, so any r within 40 of the largest logit works. z_t nearly always
does. A row where it does not shows it in S; then its tiles are computed again with r = max z. This
is decided on the device, without asking the host.

If dW is formed class by class ("by_class"), there are two sweeps, both by chunks of tokens and
blocks of classes. The first computes what belongs to tokens; the second, which knows c, what
belongs to classes. In the first, dX is summed over the blocks, and its marked row tiles are
computed again, too.

The idea of scaled exponentials comes from quack-kernels (github.com/Dao-AILab/quack), which has
offsets per tile, applied in the GEMMs.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block, P blocks.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.core.matmul import blocks, product, sum_of_products
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import Exponentials, halves_of_tiles
from lowtide.ops.linear_cross_entropy.engines.exponentials.linear_term import LinearTerm
from lowtide.ops.linear_cross_entropy.engines.exponentials.low_rank import NarrowTerm
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import reduce, tiles_of
from lowtide.ops.linear_cross_entropy.engines.exponentials.row_coefficients import coefficients
from lowtide.ops.linear_cross_entropy.engines.exponentials.row_statistics import (
    LARGEST_SUM,
    ExponentialRows,
    logsumexp,
    total,
)
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import Statistics, Terms
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import row_kernels
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.accumulators import FloatSum


class ExponentialStream(ExponentialRows):
    """Walk over one call's chunks with exponentials in place of logits, on a Hopper GPU."""

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        plan, smoothing = self.plan, terms.spread_N is not None
        # With class blocks this sweep leaves out what belongs to classes.
        by_class = plan.weight_gradient == "by_class"
        dws = [None if by_class else dw for dw in gradients.weights]
        db = None if by_class else gradients.bias
        wanted = any(each is not None for each in (*gradients.inputs, *dws, db, gradients.scale))
        self.scale_N, self.hit_N = torch.empty_like(terms.hit_N), torch.empty_like(terms.hit_N)
        self.target_logit_N = torch.empty_like(terms.hit_N)
        self.linear = [
            (NarrowTerm if k > 0 and plan.narrow_rows else LinearTerm)(
                operand, dx, dw, plan, self.class_weight_V, place=k, smoothing=smoothing
            )
            for k, (operand, dx, dw) in enumerate(zip(self.operands, gradients.inputs, dws))
        ]
        width = plan.chunk_classes if wanted else self.V
        buffer = None
        if wanted:
            # With blocks of classes, the buffer also holds what `_run` keeps for all classes.
            least = 2 * halves_of_tiles(self.V) if width < self.V else 0
            buffer = self._exponentials_buffer(plan.rows, max(width, least))
        sorted_targets = None
        if db is not None or any(dw is not None for dw in dws):
            sorted_targets = self._sorted_targets(plan.rows)
        for rows in blocks(self.M, plan.rows):
            row, stat, target_C = terms[rows], statistics[rows], self.target_N[rows]
            chunks = [operand.rows(rows) for operand in self.operands]
            raw_C = total(each.target_logits(x_CD, target_C) for each, x_CD in zip(self.linear, chunks))
            logit_C, slope_C = self.bend_(raw_C, target_C)
            self.target_logit_N[rows] = logit_C
            if take_statistics:
                stat.max_N.copy_(logit_C).masked_fill_(row.ignored_N, torch.inf)
            tiles = [
                self._tiles(chunks, row, stat, buffer=buffer, classes=classes)
                for classes in blocks(self.V, width)
            ]
            moment_C = None
            if wanted or take_statistics:
                moment_C = self._run(tiles, chunks, row, stat, logit_C, buffer, take_statistics)
            raw_smooth_C = self.raw_smooth(chunks) if smoothing else torch.empty(0)
            if take_statistics and smoothing:
                smooth_C = raw_smooth_C if self.scale is None else raw_smooth_C * self.scale
                lse_C = logsumexp(stat, logit_C)
                torch.sub(lse_C * self.total_weight(), smooth_C, out=stat.smooth_N)
            scale_C, hit_C = self.scale_N[rows], self.hit_N[rows]
            coefficients(row, stat, logit_C, slope_C, scale_C, hit_C, take_gap=take_statistics)
            if not wanted and not by_class:
                # Copies may be among them; free them before the next ones are made.
                del chunks, tiles
                continue
            if moment_C is not None:
                moment_C = moment_C * scale_C + hit_C * raw_C
                if smoothing:
                    moment_C -= row.spread_N * raw_smooth_C
                stat.moment_N.copy_(moment_C)
            targets = None if sorted_targets is None else (sorted_targets[0][rows], sorted_targets[1][rows])
            for each, x_CD in zip(self.linear, chunks):
                each.add_chunk(tiles[0].exp_CB, x_CD, row, scale_C, rows, self.hit_N, targets)
                each.finish_rows(tiles[0].exp_CB, row, scale_C, hit_C, rows)
            if db is not None and targets is not None:
                db.tensor.add_(sum_of_products(scale_C[None], tiles[0].exp_CB)[0])
                self._add_bias_targets(db.tensor, targets)
            del chunks, x_CD, tiles  # free them and the partial sums
        if db is not None:
            self._subtract_bias_spread(db.tensor, terms)

    def _sweep_classes(self, terms: Terms, statistics: Statistics, gradients: Gradients) -> None:
        """Compute dW class by class, when all row statistics are known.

        The kernel stores c E rounded once, so X is multiplied by it without scaling.
        """
        plan, operand, first_dw, db = self.plan, self.operands[0], gradients.weights[0], gradients.bias
        assert first_dw is not None
        targets = self._sorted_targets(self.M)
        place_N = torch.arange(self.M, dtype=torch.int32, device=self.device)
        one_1C = torch.ones(
            1, plan.block_rows if db is not None else 0, dtype=plan.sum_dtype, device=self.device
        )
        first_V = torch.full((self.V + 1,), self.M, dtype=torch.int32, device=self.device)
        first_V.scatter_reduce_(0, targets[0], place_N, "amin")
        sum_BD = self._buffer(plan.block_classes, operand.D)
        buffer = self._exponentials_buffer(plan.block_rows, plan.block_classes)
        chunks = [
            (rows, terms[rows], statistics[rows], self.scale_N[rows])
            for rows in blocks(self.M, plan.block_rows)
        ]
        for classes in blocks(self.V, plan.block_classes):
            block_BD = sum_BD[: classes.stop - classes.start]
            sums = [block_BD, *(dw and dw.tensor[classes] for dw in gradients.weights[1:])]
            for chunk in chunks:
                g_CB = self._add_products(sums, buffer, classes, *chunk)
                if db is not None:
                    # torch.sum would allocate memory of unknown size.
                    db.tensor[classes] += sum_of_products(one_1C[:, : g_CB.shape[0]], g_CB)[0]
            row_kernels.round_block(
                first_dw.tensor,
                block_BD,
                first_dw.applied,
                operand.input,
                self.hit_N,
                *targets,
                first_V,
                self.class_weight_V,
                self.linear[0].spread_x_D,
                first_class=classes.start,
            )
        for each, dw in zip(self.linear[1:], gradients.weights[1:]):
            if dw is not None:
                each.finish_products(FloatSum(dw.tensor), self.hit_N, targets)
        if db is not None:
            self._add_bias_targets(db.tensor, targets)
            self._subtract_bias_spread(db.tensor, terms)

    def _add_products(
        self,
        sums: list[Any],
        buffer: Tensor,
        classes: slice,
        rows: slice,
        row: Terms,
        stat: Statistics,
        scale_C: Tensor,
    ) -> Tensor:
        """Add the GEMMs of a chunk to the sums of a block of classes; return c E."""
        chunks = [each.rows(rows) for each in self.operands]
        tiles = self._tiles(chunks, row, stat, buffer=buffer, classes=classes, factor_C=scale_C)
        tiles.run()
        for sum_BD, x_CD in zip(sums, chunks):
            if sum_BD is not None:
                product(sum_BD, tiles.exp_CB.t(), x_CD, add=rows.start > 0)
        return tiles.exp_CB

    # Row statistics.

    def _tiles(
        self,
        chunks: list[Tensor],
        row: Terms,
        stat: Statistics,
        *,
        buffer: Tensor | None,
        classes: slice,
        factor_C: Tensor | None = None,
    ) -> Exponentials:
        """Return the tiles of a chunk and a block of classes, ready to run."""
        C, B = row.target_N.shape[0], classes.stop - classes.start
        return Exponentials(
            *((x_CD, operand.weight(classes)) for x_CD, operand in zip(chunks, self.operands)),
            reference_C=stat.max_N,
            target_C=row.target_N,
            out_CB=None if buffer is None else buffer[:C, :B],
            bias_B=None if self.bias_V is None else self.bias_V[classes],
            scale=self.scale,
            softcap=self.plan.options.softcap,
            pull_C=row.pull_N,
            tilt_C=row.tilt_N,
            factor_C=factor_C,
            first_class=classes.start,
        )

    def _run(
        self,
        tiles: list[Exponentials],
        chunks: list[Tensor],
        row: Terms,
        stat: Statistics,
        logit_C: Tensor,
        buffer: Tensor | None,
        take_statistics: bool,
    ) -> Tensor | None:
        """Compute E, and with `take_statistics` the row statistics that are wanted.

        With blocks of classes this computes the products that become dX too. r is replaced by the
        largest logit in rows where the target's is too far below it. Return the moment of all
        classes but the target's, or None if it is not wanted.
        """
        if take_statistics and self.plan.job.log_probs:
            (whole,) = tiles
            self._run_log_probs(whole, row, stat, logit_C)
            return None

        moment_C = None if stat.moment_N is None else torch.empty_like(logit_C)
        sum_C = stat.sum_N if take_statistics else None
        self._run_blocks(tiles, sum_C, moment_C, guarded=not take_statistics)
        if sum_C is None:
            return moment_C
        far_C = ~(sum_C <= LARGEST_SUM)  # true for NaN too
        repair = tiles_of(far_C)  # if no row is marked, the kernels below return at once
        max_C = torch.empty_like(sum_C)
        # These runs store no E. So take all classes at once; the maxima may use E's memory.
        whole = self._tiles(chunks, row, stat, buffer=None, classes=slice(0, self.V))
        maxima = whole.partials(memory=buffer if len(tiles) > 1 else None)
        whole.run(maxima=maxima, repair=repair)
        reduce(maxima, max_C, largest=True, repair=repair)
        del maxima  # free them before others are made
        stat.max_N.copy_(torch.where(far_C & ~row.ignored_N, max_C, stat.max_N))
        self._run_blocks(tiles, sum_C, moment_C, repair=repair)
        return moment_C

    def _run_blocks(
        self,
        tiles: list[Exponentials],
        sum_C: Tensor | None,
        moment_C: Tensor | None,
        *,
        repair: Tensor | None = None,
        guarded: bool = True,
    ) -> None:
        """Run each block of classes in turn, and reduce the partial sums."""
        # Each block adds to the partial sums of the one before. The first block is the largest.
        sums, moments = (None if found_C is None else tiles[0].partials() for found_C in (sum_C, moment_C))
        for each in tiles:
            each.run(sums=sums, moments=moments, repair=repair, guarded=guarded)
            for term in self.linear:
                term.add_block(each.exp_CB, each.classes, repair)
        for partials, found_C in ((sums, sum_C), (moments, moment_C)):
            if partials is not None and found_C is not None:
                reduce(partials, found_C, repair=repair)

    def _run_log_probs(self, tiles: Exponentials, row: Terms, stat: Statistics, logit_C: Tensor) -> None:
        """Compute what log-probabilities and entropies need, with r as the largest logit.

        An entropy is a sum of differences from r. Each half tile has its sums relative to its own
        largest logit; they are combined here.
        """
        sums, means, maxima = tiles.partials(), tiles.partials(), tiles.partials()
        places = tiles.partials(torch.int32)
        tiles.run(sums=sums, means=means, maxima=maxima, places=places, guarded=False)
        max_C = maxima.amax(0)
        repair = tiles_of(~max_C.isfinite() & ~row.ignored_N)
        tiles.run(maxima=maxima, places=places, repair=repair)
        stat.argmax_N.copy_(places.gather(0, maxima.argmax(0, keepdim=True))[0])
        del places
        # The target's logit comes from another kernel's sum. If it is the largest, r must be
        # exactly that number, so that gap = log(1 + S) holds.
        stat.max_N.copy_(torch.where(stat.argmax_N == row.target_N, logit_C, max_C))
        # Finite where a half has only the target or nothing.
        shift = maxima.sub_(stat.max_N).clamp_(min=-200.0)
        means.addcmul_(sums, shift)
        shift.exp_()
        torch.sum(sums.mul_(shift), 0, out=stat.sum_N)
        mean_C = means.mul_(shift).sum(0)
        distance_C = stat.max_N - logit_C
        exp_C = distance_C.neg().exp()
        excluded_C = torch.where(exp_C == 0, 0, exp_C * distance_C)
        torch.div(mean_C - excluded_C, exp_C + stat.sum_N, out=stat.mean_N)

    def _sorted_targets(self, rows: int) -> tuple[Tensor, Tensor]:
        """Sort the targets of each chunk of so many rows.

        Return the sorted targets, with ignored rows last under a class of their own, and their
        rows.
        """
        class_N = self.target_N.masked_fill(self.ignored_N, self.V)
        chunk_N = torch.arange(self.M, device=self.device).div_(max(rows, 1), rounding_mode="floor")
        place_N, order_N = chunk_N.mul_(self.V + 1).add_(class_N).sort(stable=True)
        return place_N.remainder_(self.V + 1), order_N

    def _add_bias_targets(self, sum_V: Tensor, targets: tuple[Tensor, Tensor]) -> None:
        """Add h of each row to the bias gradient of its target."""
        one_N1 = torch.ones(self.M, 1, dtype=self.plan.sum_dtype, device=self.device)
        FloatSum(sum_V[:, None]).add_target_rows(one_N1, self.hit_N, *targets)

    def _subtract_bias_spread(self, sum_V: Tensor, terms: Terms) -> None:
        """Subtract the smoothing term from the bias gradient."""
        if terms.spread_N is not None:
            spread = terms.spread_N.sum()
            sum_V.sub_(spread if self.class_weight_V is None else self.class_weight_V * spread)

    # Buffers.

    def _exponentials_buffer(self, rows: int, columns: int) -> Tensor:
        # A tensor map requires rows that are a multiple of 16 bytes.
        return torch.empty(rows, -(-columns // 8) * 8, dtype=self.plan.compute_dtype, device=self.device)
