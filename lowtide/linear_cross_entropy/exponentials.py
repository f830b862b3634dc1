"""The chunk engine without a pass over the logits, for bfloat16 on Hopper.

The logits never reach memory. As a tile of U = X W^T is summed up, bias, scale and soft cap are applied, and
it leaves as E = exp(z - r) in bfloat16, with r_i near the row's largest logit, and with 0 in the target's
column; the row's sum S of E is taken in float32 before the rounding. That is all the gradient needs, since in
each row

    G = c E + h [v = t] - spread w,   c = pull / (e + S),   h = c e - hit,   e = exp(z_t - r)        (the
    rest: rows.py)

so that dX = c (E W) + h W_t - spread (w W), and dW = E^T (c X) + the rows h X added up by target - w (spread
X): c scales rows of products, not logits, and the target's column, where p - 1 would lose its digits in
bfloat16, is exact in float32. r = z_t makes loss = log(1 + S) and h = -hit S / (1 + S): no difference of
large numbers even for a token with p = 1 - 1e-9. What a soft cap's slope or an entropy's gradient multiplies
p_v with is multiplied into E as it is stored, after it has been summed.

bfloat16 has float32's range, so any r within 40 of the largest logit serves, and z_t nearly always does. Rows
where it does not are found by their S; their tiles are computed again with r = max z, on the device, without
asking the host.

Idea of scaled exponentials: quack-kernels (github.com/Dao-AILab/quack); there with offsets per tile, in the
products.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.linear_cross_entropy import exponential_kernels as kernels
from lowtide.linear_cross_entropy import row_kernels
from lowtide.linear_cross_entropy.gradients import Gradients, Kept
from lowtide.linear_cross_entropy.linear_term import LinearTerm
from lowtide.linear_cross_entropy.operands import blocks, sum_of_products
from lowtide.linear_cross_entropy.rows import Statistics, Terms
from lowtide.linear_cross_entropy.streamed import Stream
from lowtide.linear_cross_entropy.weight_sums import FloatSum

# A larger sum means a logit some 40 above the reference; e^40 and e^-40 are far inside bfloat16's range.
LARGEST_SUM = 1e17


class ExponentialStream(Stream):
    """Statistics here are max_N = r, sum_N = S, gap_N = lse - z_t and mean_N = sum_v p_v (z_v - r)."""

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        plan, smoothing, db = self.plan, terms.spread_N is not None, gradients.bias
        dws = list(gradients.weights)
        if plan.weight_gradient == "by_class":  # not in this sweep
            dws[0] = None
        wanted = any(each is not None for each in (*gradients.inputs, *dws, db, gradients.scale))
        self.scale_N, self.hit_N = torch.empty_like(terms.hit_N), torch.empty_like(terms.hit_N)
        self.target_logit_N = torch.empty_like(terms.hit_N)
        self.linear = [
            LinearTerm(operand, dx, dws[k], plan, self.class_weight_V, first=k == 0, smoothing=smoothing)
            for k, (operand, dx) in enumerate(zip(self.operands, gradients.inputs))
        ]
        exp_CV: Any = self._exponentials_buffer(plan.rows if wanted else 0, self.V)
        for start in range(0, self.M, plan.rows):
            rows = slice(start, min(start + plan.rows, self.M))
            row, stat, target_C = terms[rows], statistics[rows], self.target_N[rows]
            chunks = [operand.rows(rows) for operand in self.operands]
            raw_C = _total(each.target_logits(x_CD, target_C) for each, x_CD in zip(self.linear, chunks))
            logit_C, slope_C = self._bend_(raw_C, target_C)
            self.target_logit_N[rows] = logit_C
            if take_statistics:
                stat.max_N.copy_(logit_C).masked_fill_(row.ignored_N, torch.inf)
            e_CV = exp_CV[: rows.stop - rows.start]
            tiles = self._tiles(chunks, row, stat, out_CB=e_CV if wanted else None)
            moment_C = self._run(tiles, row, stat, logit_C, raw_C, take_statistics)
            raw_smooth_C = self._raw_smooth(chunks) if smoothing else torch.empty(0)
            if take_statistics and smoothing:
                smooth_C = raw_smooth_C if self.scale is None else raw_smooth_C * self.scale
                lse_C = _logsumexp(stat, logit_C)
                torch.sub(lse_C * self.total_weight(), smooth_C, out=stat.smooth_N)
            if not wanted and plan.weight_gradient != "by_class":
                continue
            self._coefficients(row, stat, logit_C, slope_C, rows)
            scale_C, hit_C = self.scale_N[rows], self.hit_N[rows]
            if moment_C is not None:
                moment_C = moment_C * scale_C + hit_C * raw_C
                if smoothing:
                    moment_C -= row.spread_N * raw_smooth_C
                stat.moment_N.copy_(moment_C)
            for each, x_CD in zip(self.linear, chunks):
                each.add_chunk(e_CV, x_CD, row, target_C, scale_C, hit_C, rows)
            if db is not None:
                db.tensor.add_(sum_of_products(scale_C[None], e_CV)[0])
            del chunks, x_CD, tiles  # copies, they may be, and sums: gone before the next are made
        e_CV = exp_CV = None  # what still reads them holds them
        if self.M == 0 or not wanted:
            return
        sorted_targets = self._sorted_targets()
        for each in self.linear:
            each.finish(self.hit_N, *sorted_targets)
        if db is not None:
            self._add_bias_terms(db.tensor, terms, sorted_targets)

    def _sweep_classes(self, terms: Terms, statistics: Statistics, dw: Kept) -> None:
        plan, operand = self.plan, self.operands[0]
        sum_BD = self._buffer(plan.block_classes, operand.D)
        exponentials = self._exponentials_buffer(plan.block_rows, plan.block_classes)
        scaled_CD = torch.empty(plan.block_rows, operand.D, dtype=plan.compute_dtype, device=self.device)
        sorted_targets, spread_x_D = self._sorted_targets(), self.linear[0].spread_x_D
        for classes in blocks(self.V, plan.block_classes):
            B = classes.stop - classes.start
            weight_sum = FloatSum(sum_BD[:B])
            for start in range(0, self.M, plan.block_rows):
                rows = slice(start, min(start + plan.block_rows, self.M))
                chunks, C = [each.rows(rows) for each in self.operands], rows.stop - rows.start
                e_CB = exponentials[:C, :B]
                tiles = self._tiles(chunks, terms[rows], statistics[rows], out_CB=e_CB, classes=classes)
                tiles.run(sums=tiles.partials())
                row_kernels.scale_rows(chunks[0], self.scale_N[rows], scaled_CD[:C])
                weight_sum.add_product(e_CB, scaled_CD[:C], first=start == 0)
            weight_sum.add_target_rows(operand.input, self.hit_N, *sorted_targets, first_class=classes.start)
            if spread_x_D is not None:
                class_weight_V = self.class_weight_V
                class_weight_B = None if class_weight_V is None else class_weight_V[classes]
                weight_sum.subtract_spread(class_weight_B, spread_x_D)
            weight_sum.round_into(dw.tensor[classes], dw.rounding)

    # Statistics.

    def _tiles(
        self,
        chunks: list[Tensor],
        row: Terms,
        stat: Statistics,
        *,
        out_CB: Tensor | None,
        classes: slice = slice(0, None),
    ) -> kernels.Exponentials:
        return kernels.Exponentials(
            *((x_CD, operand.weight(classes)) for x_CD, operand in zip(chunks, self.operands)),
            reference_C=stat.max_N,
            target_C=row.target_N,
            out_CB=out_CB,
            bias_B=None if self.bias_V is None else self.bias_V[classes],
            scale=self.scale,
            softcap=self.plan.options.softcap,
            pull_C=row.pull_N,
            tilt_C=row.tilt_N,
            first_class=classes.start,
        )

    def _run(
        self,
        tiles: kernels.Exponentials,
        row: Terms,
        stat: Statistics,
        logit_C: Tensor,
        raw_C: Tensor,
        take_statistics: bool,
    ) -> Tensor | None:
        """S and gap of each row, and what log-probabilities are made of, where they are asked for; r becomes
        the largest logit where the target's was too far below it. Returns the part of the moment that the
        other classes have."""
        if take_statistics and self.plan.job.log_probs:
            self._run_log_probs(tiles, row, stat, logit_C)
            return None
        sums = tiles.partials()
        moments = None if stat.moment_N is None else tiles.partials()
        tiles.run(sums=sums, moments=moments, guarded=not take_statistics)
        if take_statistics:
            torch.sum(sums, 0, out=stat.sum_N)
            far_C = ~(stat.sum_N <= LARGEST_SUM)  # or NaN
            marked_C, repair = _tiles_of(far_C)
            tiles.run(maxima=sums, repair=repair)  # nothing is computed where no row is marked
            stat.max_N.copy_(torch.where(far_C & ~row.ignored_N, sums.amax(0), stat.max_N))
            tiles.run(sums=sums, moments=moments, repair=repair)
            stat.sum_N.copy_(torch.where(marked_C, sums.sum(0), stat.sum_N))
            self._take_gap(stat, logit_C)
        return None if moments is None else moments.sum(0)

    def _run_log_probs(
        self, tiles: kernels.Exponentials, row: Terms, stat: Statistics, logit_C: Tensor
    ) -> None:
        """r is the largest logit: an entropy is made of differences from it. Each half of a tile has its sums
        relative to its own."""
        sums, means, maxima = tiles.partials(), tiles.partials(), tiles.partials()
        places = tiles.partials(torch.int32)
        tiles.run(sums=sums, means=means, maxima=maxima, places=places, guarded=False)
        max_C = maxima.amax(0)
        _, repair = _tiles_of(~max_C.isfinite() & ~row.ignored_N)
        tiles.run(maxima=maxima, places=places, repair=repair)
        stat.argmax_N.copy_(places.gather(0, maxima.argmax(0, keepdim=True))[0])
        del places
        # The target's logit comes from a sum of its own: where it is the largest, gap = log(1 + S) holds.
        stat.max_N.copy_(torch.where(stat.argmax_N == row.target_N, logit_C, max_C))
        shift = maxima.sub_(stat.max_N).clamp_(min=-200.0)  # finite where a half has no class that counts
        means.addcmul_(sums, shift)
        shift.exp_()
        torch.sum(sums.mul_(shift), 0, out=stat.sum_N)
        mean_C = means.mul_(shift).sum(0)
        self._take_gap(stat, logit_C)
        distance_C = stat.max_N - logit_C
        exp_C = distance_C.neg().exp()
        excluded_C = torch.where(exp_C == 0, 0, exp_C * distance_C)
        torch.div(mean_C - excluded_C, exp_C + stat.sum_N, out=stat.mean_N)

    def _take_gap(self, stat: Statistics, logit_C: Tensor) -> None:
        distance_C = stat.max_N - logit_C
        log_total_C = distance_C + (distance_C.neg().exp() + stat.sum_N).log()
        stat.gap_N.copy_(torch.where(distance_C == 0, stat.sum_N.log1p(), log_total_C))

    def _bend_(self, raw_C: Tensor, target_C: Tensor) -> tuple[Tensor, Tensor | None]:
        """z and its slope, where raw_C becomes u: the product with the bias."""
        if self.bias_V is not None:
            raw_C += self.bias_V[target_C]
        logit_C = raw_C if self.scale is None else raw_C * self.scale
        softcap = self.plan.options.softcap
        if not softcap:
            return logit_C, None
        capped_C = torch.tanh(logit_C / softcap)
        return capped_C * softcap, 1 - capped_C * capped_C

    def logsumexp_N(self, statistics: Statistics) -> Tensor:
        return _logsumexp(statistics, self.target_logit_N)

    def entropy_N(self, statistics: Statistics) -> Tensor:
        exp_N = (self.target_logit_N - statistics.max_N).exp()
        return (exp_N + statistics.sum_N).log() - statistics.mean_N

    # What the gradient is made of beside E.

    def _coefficients(
        self, row: Terms, stat: Statistics, logit_C: Tensor, slope_C: Tensor | None, rows: slice
    ) -> None:
        """c and h of G = c E + h [v = t]."""
        exp_C = (logit_C - stat.max_N).exp_().masked_fill_(row.ignored_N, 1)
        total_C = exp_C + stat.sum_N
        pull_C = row.pull_N
        if row.lse_pull_N is not None:
            lse_C = _logsumexp(stat, logit_C).masked_fill_(row.ignored_N, 0)
            pull_C = pull_C + row.lse_pull_N * lse_C
        # c e - hit, without the difference of two numbers near 1
        hit_C = (pull_C - row.hit_N) * exp_C - row.hit_N * stat.sum_N
        if row.tilt_N is None:
            torch.div(pull_C, total_C, out=self.scale_N[rows])
        else:  # pull and tilt are in E
            torch.reciprocal(total_C, out=self.scale_N[rows])
            distance_C = (logit_C - stat.max_N).masked_fill_(row.ignored_N | (exp_C == 0), 0)
            hit_C += row.tilt_N * distance_C * exp_C
        self.scale_N[rows].masked_fill_(row.ignored_N, 0)
        hit_C /= total_C
        self.hit_N[rows] = hit_C if slope_C is None else hit_C * slope_C

    def _raw_smooth(self, chunks: list[Tensor]) -> Tensor:  # [C]: sum_v w_v u_v
        raw_C = _total(each.sum_of_logits(x_CD) for each, x_CD in zip(self.linear, chunks))
        if self.bias_V is not None:
            bias_V = self.bias_V if self.class_weight_V is None else self.bias_V * self.class_weight_V
            raw_C = raw_C + bias_V.sum()
        return raw_C

    def _sorted_targets(self) -> tuple[Tensor, Tensor]:
        """The targets in order, ignored rows last under a class of their own, and the rows they belong to."""
        return self.target_N.masked_fill(self.ignored_N, self.V).sort(stable=True)

    def _add_bias_terms(self, sum_V: Tensor, terms: Terms, sorted_targets: tuple[Tensor, Tensor]) -> None:
        one_N1 = torch.ones(self.M, 1, dtype=self.plan.sum_dtype, device=self.device)
        bias_sum = FloatSum(sum_V[:, None])
        bias_sum.add_target_rows(one_N1, self.hit_N, *sorted_targets)
        if terms.spread_N is not None:
            spread = terms.spread_N.sum()
            sum_V.sub_(spread if self.class_weight_V is None else self.class_weight_V * spread)

    # Buffers.

    def _exponentials_buffer(self, rows: int, columns: int) -> Tensor:
        stride = -(-columns // 8) * 8  # a tensor map wants rows of whole 16 bytes
        return torch.empty(rows, stride, dtype=self.plan.compute_dtype, device=self.device)[:, :columns]


def _total(tensors: Iterable[Tensor]) -> Tensor:
    total, *others = tensors
    for each in others:
        total += each
    return total


def _tiles_of(rows_C: Tensor) -> tuple[Tensor, Tensor]:
    """The rows whose row tile has any of these, and a mark for each row tile."""
    height = kernels.BLOCK_C
    marked = F.pad(rows_C, (0, -rows_C.shape[0] % height)).view(-1, height).any(1)
    return marked[:, None].expand(-1, height).flatten()[: rows_C.shape[0]], marked.int()


def _logsumexp(stat: Statistics, logit_C: Tensor) -> Tensor:
    return stat.max_N + ((logit_C - stat.max_N).exp() + stat.sum_N).log()
