"""One linear term of the head, on the path without a pass over the logits: what its two gradients are made
of, chunk by chunk (exponentials.py has the mathematics).

Shapes: N tokens, D features of the term, V classes; C tokens of a chunk, B classes of a block.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import row_kernels
from lowtide.linear_cross_entropy.gradients import Kept
from lowtide.linear_cross_entropy.operands import Operand, product_of_rows, sum_of_products
from lowtide.linear_cross_entropy.plan import Plan
from lowtide.linear_cross_entropy.repair_kernels import repaired_product
from lowtide.linear_cross_entropy.rows import Terms
from lowtide.linear_cross_entropy.weight_sums import FloatSum, RoundedProduct, SplitSum


class LinearTerm:
    def __init__(
        self,
        operand: Operand,
        dx: Kept | None,
        dw: Kept | None,
        plan: Plan,
        class_weight_V: Tensor | None,
        *,
        first: bool,
        smoothing: bool,
    ) -> None:
        """dx, dw: where its gradients are kept, None for one that is not made here."""
        self.operand, self.dx, self.dw, self.class_weight_V = operand, dx, dw, class_weight_V
        self.one = torch.ones((), dtype=plan.sum_dtype, device=operand.weight_VD.device)
        self.product_CD = self._empty(plan.rows if dx is not None else 0, plan.sum_dtype)
        self.scaled_CD = self._empty(plan.rows if dw is not None else 0, plan.compute_dtype)
        self.sum: Any = None
        if dw is not None:
            kind = plan.weight_gradient if first else "accumulate"
            self.sum = {"split": SplitSum, "at_once": RoundedProduct}.get(kind, FloatSum)(
                dw.tensor, dw.rounding
            )
        # With label smoothing, sum_v w_v W_v and sum_i spread_i x_i: all that it adds to the two products.
        self.total_weight_D: Tensor | None = None
        self.spread_x_D: Tensor | None = None
        if smoothing:
            ones_V = torch.ones(operand.weight_VD.shape[0], dtype=plan.sum_dtype, device=self.one.device)
            summed_V = ones_V if class_weight_V is None else class_weight_V
            self.total_weight_D = sum_of_products(summed_V[None], operand.weight_VD)[0]
            self.spread_x_D = torch.zeros_like(self.total_weight_D)

    def target_logits(self, x_CD: Tensor, target_C: Tensor) -> Tensor:  # [C]: its part of them
        return row_kernels.target_logits(x_CD, self.operand.weight_VD, target_C)

    def sum_of_logits(self, x_CD: Tensor) -> Tensor:  # [C]: its part of sum_v w_v u_v
        assert self.total_weight_D is not None
        return sum_of_products(self.total_weight_D[None], x_CD.t())[0]

    def add_block(self, e_CB: Tensor, classes: slice, repair: Tensor | None) -> None:
        """To the products that become the chunk's rows of dX; with `repair`, anew for marked row tiles."""
        if self.dx is None:
            return
        product_CD, weight_BD = self.product_CD[: e_CB.shape[0]], self.operand.weight(classes)
        if repair is None:
            product_of_rows(product_CD, e_CB, weight_BD, add=classes.start > 0)
        else:
            repaired_product(product_CD, e_CB, weight_BD, repair, add=classes.start > 0)

    def finish_rows(
        self, x_CD: Tensor, row: Terms, target_C: Tensor, scale_C: Tensor, hit_C: Tensor, rows: slice
    ) -> None:
        """The chunk's rows of dX, of the products and all else."""
        if self.spread_x_D is not None:
            self.spread_x_D += sum_of_products(row.spread_N[None], x_CD)[0]
        if self.dx is not None:
            row_kernels.input_gradient(
                self.product_CD[: x_CD.shape[0]],
                self.operand.weight_VD,
                target_C,
                row.ignored_N,
                scale_C,
                hit_C,
                row.spread_N,
                self.total_weight_D,
                self.one if self.dx.rounding is None else self.dx.rounding,
                self.dx.tensor[rows],
            )

    def add_chunk(self, e_CV: Tensor, x_CD: Tensor, scale_C: Tensor, *, first: bool, last: bool) -> None:
        """All that the chunk adds to dW but for the target rows."""
        if self.sum is not None:
            scaled_CD, factor = self.scaled_CD[: x_CD.shape[0]], self.sum.factor
            row_kernels.scale_rows(x_CD, scale_C if factor is None else scale_C * factor, scaled_CD)
            self.sum.add_product(e_CV, scaled_CD, first=first, last=last)

    def finish(self, hit_N: Tensor, targets: tuple[Tensor, Tensor] | None) -> None:
        """The rest of dW."""
        del self.product_CD, self.scaled_CD
        if self.sum is not None and targets is not None:
            self.finish_sum(self.sum, hit_N, targets)
            self.sum.round_in_place()

    def finish_sum(self, sum: Any, hit_N: Tensor, targets: tuple[Tensor, Tensor]) -> None:
        """The rows that the targets add, in the order of their classes, and what smoothing does."""
        sum.add_target_rows(self.operand.input, hit_N, *targets)
        if self.spread_x_D is not None:
            sum.subtract_spread(self.class_weight_V, self.spread_x_D)

    def _empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, self.operand.D, dtype=dtype, device=self.one.device)
