"""The chunk engine without a pass over the logits, for bfloat16 on Hopper.

The logits never reach memory. As a tile of Z = X W^T is summed up, it leaves as E = exp(Z - r) in bfloat16,
with r_i near the row's largest logit, and with 0 in the target's column; the row's sum S of E is taken in
float32 before the rounding. That is all the gradient needs, since in each row

    G = c E + h [v = t],   c = pull / (e + S),   h = c e - hit,   e = exp(z_t - r)        (pull, hit: rows.py)

so that dX = c (E W) + h W_t, and dW = E^T (c X) + the rows h X added up by target: c scales rows of
products, not logits, and the target's column, where p - 1 would lose its digits in bfloat16, is exact in
float32. r = z_t makes loss = log(1 + S) and h = -hit S / (1 + S): no difference of large numbers even for a
token with p = 1 - 1e-9.

bfloat16 has float32's range, so any r within 40 of the largest logit serves, and z_t nearly always does.
Rows where it does not are found by their S; their tiles are computed again with r = max z, on the device,
without asking the host.

Idea of scaled exponentials: quack-kernels (github.com/Dao-AILab/quack); there with offsets per tile, in the
products.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.linear_cross_entropy import exponential_kernels as kernels
from lowtide.linear_cross_entropy import scaling
from lowtide.linear_cross_entropy.rows import Statistics, Terms
from lowtide.linear_cross_entropy.streamed import NO_GRADIENTS, Gradients, Kept, Stream, product

# A larger sum means a logit some 40 above the reference; e^40 and e^-40 are far inside bfloat16's range.
LARGEST_SUM = 1e17


class ExponentialStream(Stream):
    """Statistics here are max_N = r, sum_N = S and gap_N = lse - z_t."""

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        plan = self.plan
        dx, dw = gradients.input, gradients.weight
        if plan.weight_gradient == "by_class":
            dw = None  # not in this sweep
        wanted = dx is not None or dw is not None
        exp_CV = self._exponentials_buffer(plan.rows if wanted else 0, self.V)
        product_CD = self._buffer(plan.rows if dx is not None else 0, self.D)
        scaled_CD = self._operand_buffer(plan.rows if dw is not None else 0)
        self.scale_N, self.hit_N = torch.empty_like(terms.hit_N), torch.empty_like(terms.hit_N)
        one = torch.ones((), dtype=plan.sum_dtype, device=self.device)
        for start in range(0, self.N, plan.rows):
            rows = slice(start, min(start + plan.rows, self.N))
            C = rows.stop - rows.start
            x_CD, stat, target_C = self._rows(rows), statistics[rows], self.target_N[rows]
            target_logit_C = kernels.target_logits(x_CD, self.weight_VD, target_C)
            if take_statistics:
                stat.max_N.copy_(target_logit_C).masked_fill_(self.ignored_N[rows], torch.inf)
            e_CV = exp_CV[:C]
            tiles = kernels.Exponentials(
                x_CD, self.weight_VD, stat.max_N, target_C, out_CB=e_CV if wanted else None
            )
            if take_statistics:
                _take_sums(tiles, stat, target_logit_C)
            elif wanted:
                tiles.sums()
            if gradients is not NO_GRADIENTS:
                self._coefficients(terms[rows], stat, target_logit_C, rows)
            scale_C, hit_C = self.scale_N[rows], self.hit_N[rows]
            if dx is not None:
                product(product_CD[:C], e_CV, self.weight_VD)
                factor = one if dx.rounding is None else dx.rounding
                kernels.input_gradient(
                    product_CD[:C], self.weight_VD, target_C, scale_C, hit_C, factor, dx.tensor[rows]
                )
            if dw is not None:
                kernels.scale_rows(x_CD, scale_C, scaled_CD[:C])
                product(dw.tensor, e_CV.t(), scaled_CD[:C], add=start > 0)
            del x_CD, tiles  # a copy, it may be, and sums: gone before the next are made
        del exp_CV, product_CD, scaled_CD
        if dw is not None:
            self._add_target_rows(dw.tensor, *self._sorted_targets(), first_class=0)

    def _sweep_classes(self, terms: Terms, statistics: Statistics, dw: Kept) -> None:
        plan = self.plan
        sum_BD = self._buffer(plan.block_classes, self.D)
        exponentials = self._exponentials_buffer(plan.block_rows, plan.block_classes)
        scaled_CD = self._operand_buffer(plan.block_rows)
        class_N, order_N = self._sorted_targets()
        for classes in self._blocks(plan.block_classes):
            weight_BD, B = self._weight_block(classes), classes.stop - classes.start
            for start in range(0, self.N, plan.block_rows):
                rows = slice(start, min(start + plan.block_rows, self.N))
                x_CD, C = self._rows(rows), rows.stop - rows.start
                e_CB = exponentials[:C, :B]
                kernels.Exponentials(
                    x_CD,
                    weight_BD,
                    statistics.max_N[rows],
                    self.target_N[rows],
                    out_CB=e_CB,
                    first_class=classes.start,
                ).sums()
                kernels.scale_rows(x_CD, self.scale_N[rows], scaled_CD[:C])
                product(sum_BD[:B], e_CB.t(), scaled_CD[:C], add=start > 0)
            self._add_target_rows(sum_BD[:B], class_N, order_N, first_class=classes.start)
            scaling.scale_into(dw.tensor[classes], sum_BD[:B], dw.rounding, plan.backend)

    def _coefficients(self, terms: Terms, stat: Statistics, target_logit_C: Tensor, rows: slice) -> None:
        """c and h of G = c E + h [v = t]."""
        exp_C = (target_logit_C - stat.max_N).exp_().masked_fill_(self.ignored_N[rows], 1)
        total_C = exp_C + stat.sum_N
        torch.div(terms.pull_N, total_C, out=self.scale_N[rows])
        # c e - hit, without the difference of two numbers near 1
        hit_C = (terms.pull_N - terms.hit_N) * exp_C - terms.hit_N * stat.sum_N
        torch.div(hit_C, total_C, out=self.hit_N[rows])

    def _sorted_targets(self) -> tuple[Tensor, Tensor]:
        """The targets in order, ignored rows last under a class of their own, and the rows they belong to."""
        return self.target_N.masked_fill(self.ignored_N, self.V).sort(stable=True)

    def _add_target_rows(self, sum_BD: Tensor, class_N: Tensor, order_N: Tensor, *, first_class: int) -> None:
        if self.N:
            kernels.add_target_rows(sum_BD, self.input, self.hit_N, class_N, order_N, first_class=first_class)

    def _exponentials_buffer(self, rows: int, columns: int) -> Tensor:
        stride = -(-columns // 8) * 8  # a tensor map wants rows of whole 16 bytes
        return torch.empty(rows, stride, dtype=self.plan.compute_dtype, device=self.device)[:, :columns]

    def _operand_buffer(self, rows: int) -> Tensor:
        return torch.empty(rows, self.D, dtype=self.plan.compute_dtype, device=self.device)


def _take_sums(tiles: kernels.Exponentials, stat: Statistics, target_logit_C: Tensor) -> None:
    """S and gap of each row; r becomes the largest logit where the target's was too far below it."""
    sum_C = tiles.sums()
    far_C = sum_C > LARGEST_SUM
    marked = F.pad(far_C, (0, -far_C.shape[0] % kernels.BLOCK_C)).view(-1, kernels.BLOCK_C).any(1).int()
    max_C = tiles.maxima(marked)  # of marked rows; nothing is computed where there are none
    stat.max_N.copy_(torch.where(far_C, max_C, stat.max_N))
    stat.sum_N.copy_(tiles.repaired_sums(marked))
    distance_C = stat.max_N - target_logit_C
    log_total_C = distance_C + (distance_C.neg().exp() + stat.sum_N).log()
    stat.gap_N.copy_(torch.where(distance_C == 0, stat.sum_N.log1p(), log_total_C))
