"""Run the exponentials engine on a CPU with bfloat16 units.

The formulas are in exponentials/engine.py, the GEMMs in core/bfloat16_units. The engine supports
one linear term and class indices, but no log-probabilities (spec.py has the list). If the reference
of a row is too far below the row's largest logit, the exponentials of its chunk are computed again.

Shapes: N tokens, D features, V classes; C tokens of a chunk, B classes of a block.
"""

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.bfloat16_units import gemm
from lowtide.core.elementwise import scaled
from lowtide.core.matmul import blocks, in_three_parts
from lowtide.ops.linear_cross_entropy.engines.cpu_exponentials.spec import VECTOR_BLOCK
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import (
    LARGEST_SUM,
    ExcludedTargetStats,
    RowCoefs,
    excluded_coefs,
)
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import (
    WeightAccumulator,
    choose_accumulator,
)
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_torch import FloatSum

OfTokens = tuple[Tensor, Tensor, Tensor | None]
"""c and h of exponentials/engine.py, for each row, and the sum of smoothing_coef x over rows."""


class CpuExponentialsEngine(LossEngine):
    """Walk over one call's chunks on the CPU, and store exponentials in place of logits."""

    stats_kind = ExcludedTargetStats

    def walk_tokens(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, take_stats: bool
    ) -> OfTokens:
        plan, (operand,), (dw,), db = self.plan, self.operands, gradients.weights, gradients.bias
        sum = choose_accumulator(plan, 0, dw, gemm.multiply_transposed)
        dx = self.input_rows(gradients.inputs[0])
        needs_grad = any(each is not None for each in (dx, sum, db))
        exp_CV = self.buffer(plan.rows, self.V, dtype=plan.compute_dtype) if needs_grad else None
        row_scale_M = torch.empty_like(coefs.target_coef_N)
        target_weight_coef_M = torch.empty_like(row_scale_M)
        total_weight_D = total_bias = smoothing_row_D = None
        if coefs.smoothing_coef_N is not None and self.M:
            if take_stats or dx is not None:
                total_weight_D, total_bias = self._totals()
            smoothing_row_D = self.buffer(operand.D).zero_() if dw is not None else None
        for rows in blocks(self.M, plan.rows):
            row, stat, x_CD = coefs[rows], stats[rows], operand.rows(rows)
            w_CD = operand.weight_VD[row.target_N].to(plan.sum_dtype)
            logit_C, slope_C = self.target_logits(scaled(x_CD, w_CD).sum(1), row.target_N)
            e_CV = None if exp_CV is None else exp_CV[: x_CD.shape[0]]
            if take_stats:
                stat.target_logit_N.copy_(logit_C)
                self._take_stats(x_CD, e_CV, row.target_N, logit_C, stat)
            elif e_CV is not None:
                self._exponentials(x_CD, e_CV, row.target_N, stat.max_N)
            c_C, h_C = excluded_coefs(row, stat, logit_C, take_nll=take_stats)
            if slope_C is not None:
                h_C *= slope_C
            if total_weight_D is not None and take_stats:
                raw_smooth_C = scaled(x_CD, total_weight_D).sum(1)
                if total_bias is not None:
                    raw_smooth_C += total_bias
                self.take_smooth_nll(stat, logit_C, raw_smooth_C)
                del raw_smooth_C
            row_scale_M[rows], target_weight_coef_M[rows] = c_C, h_C
            if e_CV is None:
                continue
            if dx is not None:
                dx_CD = dx.memory(rows)
                gemm.multiply(dx_CD, e_CV, operand.weight_VD, add=False)
                dx_CD.mul_(c_C[:, None]).add_(w_CD.mul_(h_C[:, None]))
                if total_weight_D is not None:
                    dx_CD.addr_(row.smoothing_coef_N, total_weight_D, alpha=-1)
                dx.store(rows)
            del w_CD  # free it before another tensor of its size is allocated
            if smoothing_row_D is not None:
                smoothing_row_D += scaled(x_CD, row.smoothing_coef_N[:, None]).sum(0)
            if sum is not None:
                self._add_rows(sum, e_CV, x_CD, row.target_N, c_C, h_C, first=rows.start == 0)
            if db is not None:
                self._add_bias(db.tensor, e_CV, row.target_N, c_C, h_C)
        if sum is not None and self.M:
            if smoothing_row_D is not None:
                sum.subtract_outer(self.class_weight_V, smoothing_row_D)
            sum.finish()
        if db is not None and coefs.smoothing_coef_N is not None:
            total_coef = coefs.smoothing_coef_N.sum()
            if self.class_weight_V is None:
                db.tensor.sub_(total_coef)
            else:
                db.tensor.addcmul_(self.class_weight_V, total_coef, value=-1)
        return row_scale_M, target_weight_coef_M, smoothing_row_D

    def walk_classes(
        self, coefs: RowCoefs, stats: ExcludedTargetStats, gradients: Gradients, of_tokens: OfTokens
    ) -> None:
        (row_scale_M, target_weight_coef_M, smoothing_row_D), (dw,) = of_tokens, gradients.weights
        assert dw is not None
        plan, operand = self.plan, self.operands[0]
        sum_BD = self.buffer(plan.block_classes, operand.D)
        exp = self.buffer(plan.block_rows * plan.block_classes, dtype=plan.compute_dtype)
        for classes in blocks(self.V, plan.block_classes):
            B = classes.stop - classes.start
            part = slice(0, B), sum_BD[:B]
            sum = FloatSum(part, first_class=classes.start, multiply=gemm.multiply_transposed)
            for rows in blocks(self.M, plan.block_rows):
                target_C, x_CD = coefs.target_N[rows], operand.rows(rows)
                e_CB = exp[: x_CD.shape[0] * B].view(-1, B)
                self._exponentials(x_CD, e_CB, target_C, stats.max_N[rows], classes)
                c_C, h_C = row_scale_M[rows], target_weight_coef_M[rows]
                self._add_rows(sum, e_CB, x_CD, target_C, c_C, h_C, first=rows.start == 0)
            if smoothing_row_D is not None:
                sum.subtract_outer(self.class_weight_V, smoothing_row_D)
            pending_gradient.scale_into(dw.tensor[classes], sum_BD[:B], dw.applied, plan.backend, spent=True)

    # Label smoothing, whose term of the logits' gradient is smoothing_coef w, of rank 1.

    def _totals(self) -> tuple[Tensor, Tensor | None]:
        """Return sum_v w_v W_v [D], exact to float32, and sum_v w_v b_v if there is a bias."""
        weight_VD, weight_V = self.operands[0].weight_VD, self.class_weight_V
        parts = 1 if weight_V is None else 3
        sum_KD = self.buffer(parts, weight_VD.shape[1]).zero_()
        for classes in blocks(self.V, VECTOR_BLOCK):
            weight_BD = weight_VD[classes]
            if weight_V is None:
                parts_KB = torch.ones(1, weight_BD.shape[0], dtype=weight_BD.dtype)
            else:
                parts_KB = torch.stack(in_three_parts(weight_V[classes], weight_BD.dtype))
            gemm.multiply(sum_KD, parts_KB, weight_BD, add=True)
            del parts_KB  # free them before the next ones are made
        total_weight_D, bias_V = sum_KD.sum(0), self.transform.bias_V
        if bias_V is None:
            return total_weight_D, None
        return total_weight_D, bias_V.sum() if weight_V is None else weight_V.dot(bias_V)

    # Steps of the walks.

    def _take_stats(
        self,
        x_CD: Tensor,
        e_CV: Tensor | None,
        target_C: Tensor,
        reference_C: Tensor,
        stat: ExcludedTargetStats,
    ) -> None:
        """Compute r, S and E of a chunk, and compute them again if a reference is too low.

        The new reference of such a row is its largest logit other than the target's. If all these
        logits are -inf, the new reference and S are 0.
        """
        sum_C, max_C = self._exponentials(x_CD, e_CV, target_C, reference_C)
        far_C = ~(sum_C <= LARGEST_SUM)  # true for NaN too
        max_C.masked_fill_(max_C == -torch.inf, 0)
        stat.max_N.copy_(torch.where(far_C, max_C, reference_C))
        if far_C.any():
            sum_C, _ = self._exponentials(x_CD, e_CV, target_C, stat.max_N)
        stat.sum_N.copy_(sum_C)

    def _exponentials(
        self,
        x_CD: Tensor,
        e_CB: Tensor | None,
        target_C: Tensor,
        reference_C: Tensor,
        classes: slice = slice(0, None),
    ) -> tuple[Tensor, Tensor]:
        """Write E of a block of classes to `e_CB`, if given; return S and the rows' largest logits.

        Both leave the target out.
        """
        weight_BD = self.operands[0].weight_VD[classes]
        bias_B, scale = self.transform.of(classes).bias_V, self.transform.scale
        if bias_B is not None:
            bias_B = (bias_B if scale is None else bias_B * scale).contiguous()
        here_C = target_C - classes.start
        here_C.masked_fill_(here_C >= weight_BD.shape[0], -1).clamp_(min=-1)
        return gemm.exponentials(
            x_CD,
            weight_BD,
            reference_C,
            here_C,
            scale=1.0 if scale is None else float(scale),
            bias_V=bias_B,
            softcap=self.transform.softcap,
            out_CV=e_CB,
        )

    def _add_rows(
        self,
        sum: WeightAccumulator,
        e_CB: Tensor,
        x_CD: Tensor,
        target_C: Tensor,
        c_C: Tensor,
        h_C: Tensor,
        *,
        first: bool,
    ) -> None:
        """Add E^T (c X) to the sum of a block of classes, and the rows h X at their targets."""
        scaled_CD = scaled(x_CD, c_C[:, None]).to(x_CD.dtype)
        sum.add_product(e_CB, scaled_CD, first=first, last=False)
        del scaled_CD  # free it before `add_target_rows` allocates
        sum.add_target_rows(x_CD, h_C, target_C, slice(None))

    def _add_bias(self, db_V: Tensor, e_CV: Tensor, target_C: Tensor, c_C: Tensor, h_C: Tensor) -> None:
        """Add the chunk's bias gradient, E^T c and h at the targets, exact to float32."""
        parts_C3 = torch.stack(in_three_parts(c_C, e_CV.dtype), 1)
        sum_B3 = self.buffer(min(self.V, VECTOR_BLOCK), 3)
        for classes in blocks(self.V, VECTOR_BLOCK):
            block_B3 = sum_B3[: classes.stop - classes.start]
            gemm.multiply_transposed(block_B3, e_CV[:, classes], parts_C3, add=False)
            db_V[classes].add_(block_B3.sum(1))
        db_V.index_add_(0, target_C, h_C)
