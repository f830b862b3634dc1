"""Run the engine of exponentials/engine.py, which has the formulas, on a CPU with bfloat16 units.

The GEMMs are those of lowtide/core/cpu_gemm. The engine supports one linear term and class indices,
but no soft cap, no label smoothing and no entropy (planning/requirements.py has the list). If the
reference of a row is too far below its largest logit, its chunk is computed again.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.cpu_gemm import gemm
from lowtide.core.matmul import blocks
from lowtide.ops.linear_cross_entropy.engines.exponentials.row_statistics import (
    LARGEST_SUM,
    ExponentialRows,
    logsumexp,
)
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_torch import Statistics, Terms
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_place import SharedSum


class CpuExponentialStream(ExponentialRows):
    """Walk over one call's chunks with exponentials in place of logits, on the CPU."""

    def _sweep(
        self, terms: Terms, statistics: Statistics, gradients: Gradients, *, take_statistics: bool
    ) -> None:
        plan, (operand,), (dx,), (dw,) = self.plan, self.operands, gradients.inputs, gradients.weights
        db, by_class = gradients.bias, plan.weight_gradient == "by_class"
        self.target_logit_N, self.scale_N, self.hit_N = (torch.empty_like(terms.hit_N) for _ in range(3))
        wanted = dx is not None or db is not None or (dw is not None and not by_class)
        exp_CV = self._empty(plan.rows, self.V) if wanted else None
        buffer_CD = None
        if dx is not None and not self._writes_directly(dx):
            buffer_CD = self._buffer(plan.rows, operand.D)
        shared, sums = None, []
        if dw is not None and plan.weight_gradient == "split":
            shared = SharedSum(dw.tensor, dw.applied)
            # With one class, one part is empty.
            sums = [part for part in shared.parts if part[1].shape[0]]
        elif dw is not None and not by_class:
            sums = [(slice(0, self.V), dw.tensor)]
        for rows in blocks(self.M, plan.rows):
            row, stat, x_CD = terms[rows], statistics[rows], operand.rows(rows)
            C = x_CD.shape[0]
            w_CD = operand.weight_VD[row.target_N].to(plan.sum_dtype)
            logit_C, _ = self.bend_((w_CD * x_CD).sum(1), row.target_N)
            self.target_logit_N[rows] = logit_C
            e_CV = None if exp_CV is None else exp_CV[:C]
            if take_statistics:
                self._take_statistics(x_CD, e_CV, row, stat, logit_C)
            elif e_CV is not None:
                self._exponentials(x_CD, e_CV, row.target_N, stat.max_N)
            c_C, h_C = coefficients(row, stat, logit_C, take_gap=take_statistics)
            self.scale_N[rows], self.hit_N[rows] = c_C, h_C
            if e_CV is None:
                continue
            if dx is not None:
                dx_CD = dx.tensor[rows] if buffer_CD is None else buffer_CD[:C]
                gemm.multiply(dx_CD, e_CV, operand.weight_VD, add=False)
                dx_CD.mul_(c_C[:, None]).add_(w_CD.mul_(h_C[:, None]))
                if buffer_CD is not None:
                    self._keep_rows(dx, dx_CD, rows)
            del w_CD  # free it before another of its size is made
            if sums:
                self._add_rows(sums, e_CV, x_CD, rows, row)
            if db is not None:
                self._add_bias(db.tensor, e_CV, rows, row)
        if shared is not None and self.M:
            shared.round_in_place()

    def _sweep_classes(self, terms: Terms, statistics: Statistics, gradients: Gradients) -> None:
        """Compute dW class by class; the row coefficients are known from the other sweep."""
        plan, operand, (dw,) = self.plan, self.operands[0], gradients.weights
        assert dw is not None
        sum_BD = self._buffer(plan.block_classes, operand.D)
        exp = self._empty(plan.block_rows, plan.block_classes).view(-1)
        for classes in blocks(self.V, plan.block_classes):
            B = classes.stop - classes.start
            for rows in blocks(self.M, plan.block_rows):
                row, x_CD = terms[rows], operand.rows(rows)
                e_CB = exp[: x_CD.shape[0] * B].view(-1, B)
                self._exponentials(x_CD, e_CB, row.target_N, statistics.max_N[rows], classes)
                self._add_rows([(slice(0, B), sum_BD[:B])], e_CB, x_CD, rows, row, classes.start)
            pending_gradient.scale_into(dw.tensor[classes], sum_BD[:B], dw.applied, plan.backend, spent=True)

    # Steps of the walks.

    def _take_statistics(
        self, x_CD: Tensor, e_CV: Tensor | None, row: Terms, stat: Statistics, logit_C: Tensor
    ) -> None:
        """Compute E and S of a chunk, again with a new reference if the first is too low."""
        sum_C, max_C = self._exponentials(x_CD, e_CV, row.target_N, logit_C)
        far_C = ~(sum_C <= LARGEST_SUM)  # true for NaN too
        stat.max_N.copy_(torch.where(far_C, max_C, logit_C))
        if far_C.any():
            sum_C, _ = self._exponentials(x_CD, e_CV, row.target_N, stat.max_N)
        stat.sum_N.copy_(sum_C)

    def _exponentials(
        self,
        x_CD: Tensor,
        e_CB: Tensor | None,
        target_C: Tensor,
        reference_C: Tensor,
        classes: slice = slice(0, None),
    ) -> tuple[Tensor, Tensor]:
        """Write E of a block of classes; return S and each row's largest other logit."""
        weight_BD = self.operands[0].weight_VD[classes]
        bias_B = None if self.bias_V is None else self.bias_V[classes]
        if bias_B is not None and self.scale is not None:
            bias_B = bias_B * self.scale
        here_C = target_C - classes.start
        here_C.masked_fill_(here_C >= weight_BD.shape[0], -1).clamp_(min=-1)
        return gemm.exponentials(
            x_CD,
            weight_BD,
            reference_C,
            here_C,
            scale=1.0 if self.scale is None else float(self.scale),
            bias_V=bias_B,
            out_CV=e_CB,
        )

    def _add_rows(
        self,
        sums: list[tuple[slice, Tensor]],
        e_CB: Tensor,
        x_CD: Tensor,
        rows: slice,
        row: Terms,
        first_class: int = 0,
    ) -> None:
        """Add E^T (c X), and the rows h X at their targets, to the sums of a block of classes."""
        scaled_CD = (x_CD * self.scale_N[rows, None]).to(x_CD.dtype)
        for classes, sum_BD in sums:
            gemm.multiply_transposed(sum_BD, e_CB[:, classes], scaled_CD, add=rows.start > 0)
        del scaled_CD  # free it before others are made
        targets_CD = x_CD * self.hit_N[rows, None]
        for classes, sum_BD in sums:
            column_C = row.target_N - (first_class + classes.start)
            here = ((column_C >= 0) & (column_C < sum_BD.shape[0])).nonzero()[:, 0]
            sum_BD.index_add_(0, column_C[here], targets_CD[here])

    def _add_bias(self, db_V: Tensor, e_CV: Tensor, rows: slice, row: Terms) -> None:
        """Add the chunk's bias gradient, exact to float32.

        c is cut into three numbers of E's dtype that add up to it.
        """
        rest_C, parts = self.scale_N[rows], []
        for _ in range(3):
            parts.append(rest_C.to(e_CV.dtype))
            rest_C = rest_C - parts[-1]
        sum_V3 = self._buffer(self.V, 3)
        gemm.multiply_transposed(sum_V3, e_CV, torch.stack(parts, 1), add=False)
        db_V.add_(sum_V3.sum(1)).index_add_(0, row.target_N, self.hit_N[rows])

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=self.plan.compute_dtype)


def coefficients(row: Terms, stat: Statistics, logit_C: Tensor, *, take_gap: bool) -> tuple[Tensor, Tensor]:
    """Return c and h of G = c E + h [v = t]; with `take_gap`, compute lse - z_t as well."""
    distance_C = stat.max_N - logit_C
    exp_C = distance_C.neg().exp()
    total_C = exp_C + stat.sum_N
    if take_gap:
        torch.where(distance_C == 0, stat.sum_N.log1p(), distance_C + total_C.log(), out=stat.gap_N)
    pull_C = row.pull_N
    if row.lse_pull_N is not None:
        pull_C = pull_C + row.lse_pull_N * logsumexp(stat, logit_C)
    # c e - hit, written so that no two numbers near 1 are subtracted
    rest_C = (pull_C - row.hit_N) * exp_C - row.hit_N * stat.sum_N
    return pull_C / total_C, rest_C / total_C
