"""Form both gradients of one linear term of the head, chunk by chunk, in the exponentials engine.

exponentials/engine.py has the formulas, with the coefficients c (`row_scale`) and h
(`target_weight_coef`) of each row.

A chunk adds two terms to dW: the product of its exponentials and its scaled rows c X, and its
target rows h X, each added to the row's target class. For the chunk's rows of dX, a GEMM multiplies
its exponentials and the weight. `input_gradient` in row_kernels.py then multiplies this product by
c and adds the other terms.

The GEMM of dW runs before that of dX, because the scaled rows lie in the memory where the rows of
dX will be. The last chunk finishes dW before it writes dX, because finishing dW may read the scaled
rows again.

If ignored rows come last (gemm/counted_rows.py), kernels of ours form the chunk's rows of dX
(input_gradient.py). The chunk's rows of X are first gathered into the memory of the scaled rows.
Each row of dX is written at the row's own number, which may be of another chunk. So only a single
chunk can gather rows in dX's memory. Ignored rows of dX are cleared at the end.

Shapes: N tokens, D features of the term, V classes; C tokens of a chunk, B classes of a block.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.core.matmul import Operand, blocks, product, product_of_rows, sum_of_products
from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.linear_cross_entropy.engines.exponentials import input_gradient
from lowtide.ops.linear_cross_entropy.engines.exponentials.recompute import recomputed_product
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import row_kernels
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import WeightAccumulator

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm.launch import Exponentials
    from lowtide.ops.linear_cross_entropy.planning.plan import Plan


TargetRows = tuple[Tensor, Tensor, Tensor, Tensor]
"""X; h of each row of X; a chunk's target classes, sorted; and the row of X of each target."""


class LinearTerm:
    """Form dX and dW of one linear term."""

    def __init__(
        self,
        operand: Operand,
        dx: PendingGradient | None,
        sum: WeightAccumulator | None,
        plan: "Plan",
        class_weight_V: Tensor | None,
        *,
        place: int,
        smoothing: bool,
    ) -> None:
        """Allocate the sums that label smoothing needs, and memory for scaled rows.

        `dx` is None if dX is not wanted. `sum` is None if dW is not wanted, or is formed one block
        of classes at a time. `place` is the term's place in the head.
        """
        self.operand, self.dx, self.sum, self.plan = operand, dx, sum, plan
        self.class_weight_V = class_weight_V
        # The chunk's product for dX, summed over the blocks of classes so far; None if the
        # exponentials of all blocks are stored.
        self.product_CD: Tensor | None = None
        self.scaled_CD: Tensor | None = None  # scaled rows, if dX's memory cannot hold them
        lacks_room = dx is None or not plan.access.scales_in_gradient[place]
        gathers_chunks = plan.skips_ignored and (dx is None or plan.rows < dx.tensor.shape[0])
        if gathers_chunks or (lacks_room and sum is not None):
            self.scaled_CD = self._empty(plan.rows, plan.compute_dtype)
        # Label smoothing subtracts smoothing_coef_i total_weight from row i of dX, and
        # w_v smoothing_row from row v of dW, where w_v is the class weight:
        # total_weight = sum_v w_v W_v, smoothing_row = sum_i smoothing_coef_i x_i.
        self.total_weight_D: Tensor | None = None
        self.smoothing_row_D: Tensor | None = None
        if smoothing:
            weight_VD, summed_V = operand.weight_VD, class_weight_V
            if summed_V is None:
                summed_V = torch.ones(weight_VD.shape[0], dtype=plan.sum_dtype, device=weight_VD.device)
            self.total_weight_D = sum_of_products(summed_V[None], weight_VD)[0]
            self.smoothing_row_D = torch.zeros_like(self.total_weight_D)

    def rows(self, rows: slice, counted: CountedChunk) -> Tensor:  # [C, D]
        """Return the chunk's rows of X, gathered if ignored rows come last."""
        if counted.row_C is None:
            return self.operand.rows(rows)
        x_CD = self._scaled_rows(rows)
        row_kernels.gather_rows(x_CD, self.operand.input, counted)
        return x_CD

    def clear_ignored_rows(self, counted: CountedChunk) -> None:
        """Write zeros to the rows of dX that do not count."""
        if self.dx is not None and counted.row_C is not None:
            row_kernels.clear_rows(self.dx.tensor, counted)

    def target_logits(
        self, x_CD: Tensor, target_C: Tensor, logit_C: Tensor, counted: CountedChunk, **first: Tensor | None
    ) -> None:
        """Write this term's part of the target logits to logit_C.

        `first` is passed on to `target_logits` in row_kernels.py, for references and marks.
        """
        row_kernels.target_logits(x_CD, self.operand.weight_VD, target_C, logit_C, counted=counted, **first)

    def sum_of_logits(self, x_CD: Tensor) -> Tensor:
        """Return this term's part of sum_v w_v u_v, [C]."""
        assert self.total_weight_D is not None
        return sum_of_products(self.total_weight_D[None], x_CD.t())[0]

    def add_block(self, e_CB: Tensor, classes: slice, marks: Tensor | None) -> None:
        """Add the product of a block of classes to the chunk's product for dX.

        The next block overwrites the exponentials of this one. With `marks`, compute only marked
        row tiles.
        """
        if self.dx is None:
            return
        if self.product_CD is None:
            self.product_CD = self._empty(e_CB.shape[0], self.plan.sum_dtype)
        weight_BD, add = self.operand.weight(classes), classes.start > 0
        if marks is None:
            product_of_rows(self.product_CD, e_CB, weight_BD, add=add)
        else:
            recomputed_product(self.product_CD, e_CB, weight_BD, marks, add=add)

    def add_chunk(
        self,
        e_CV: Tensor,
        x_CD: Tensor,
        row: RowCoefs,
        row_scale_C: Tensor,
        rows: slice,
        target_rows: TargetRows | None,
        counted: CountedChunk = ALL,
        *,
        first: bool,
        last: bool,
    ) -> None:
        """Add the chunk's two terms to dW; with the last chunk, finish dW.

        The target rows are added right after the chunk's product, because the two terms nearly
        cancel for a frequent class of a trained model. A sum of all products alone would be
        rounded by more than the difference that is left.
        """
        if self.smoothing_row_D is not None:
            self.smoothing_row_D += sum_of_products(row.smoothing_coef_N[None], x_CD)[0]
        if self.sum is None or target_rows is None:
            return
        scaled_CD = self._scaled_rows(rows)
        row_kernels.scale_rows(x_CD, row_scale_C, self.sum.factor, scaled_CD, counted)
        self.sum.add_product(e_CV, scaled_CD, first=first, last=last, counted=counted)
        self.sum.add_target_rows(*target_rows)
        if last:
            self._subtract_smoothing(self.sum)
            self.sum.finish()

    @property
    def reads_all_rows(self) -> bool:
        """Return True if the GEMM of dW reads rows that do not count, so these must be finite."""
        return self.sum is not None and not self.sum.ends_early

    def _scaled_rows(self, rows: slice) -> Tensor:  # [C, D]
        if self.scaled_CD is not None:
            return self.scaled_CD[: rows.stop - rows.start]
        assert self.dx is not None
        return self.dx.tensor[rows].view(self.plan.compute_dtype)[:, : self.operand.D]

    def finish_products(
        self, sum: WeightAccumulator, target_weight_coef_N: Tensor, targets: tuple[Tensor, Tensor]
    ) -> None:
        """Add the target rows to dW and subtract the smoothing term, after all products."""
        sum.add_target_rows(self.operand.input, target_weight_coef_N, *targets)
        self._subtract_smoothing(sum)

    def _subtract_smoothing(self, sum: WeightAccumulator) -> None:
        if self.smoothing_row_D is not None:
            sum.subtract_outer(self.class_weight_V, self.smoothing_row_D)

    def finish_rows(
        self,
        tiles: "list[Exponentials]",
        row: RowCoefs,
        row_scale_C: Tensor,
        rows: slice,
        target_weight_coef_N: Tensor,
        counted: CountedChunk,
    ) -> None:
        """Compute the chunk's rows of dX, after dW's GEMM has read the scaled rows.

        If no ignored rows come last, plan.product_rows rows are computed at a time.
        """
        if self.dx is None:
            return
        if counted.row_C is not None:
            input_gradient.input_gradient(
                tiles[0].exp_CB,
                self.operand.weight_VD,
                row.target_N,
                row.ignored_N,
                row_scale_C,
                target_weight_coef_N,
                row.smoothing_coef_N,
                self.total_weight_D,
                self.dx.applied,
                self.dx.tensor,
                counted,
            )
            return
        out_CD, target_weight_coef_C = self.dx.tensor[rows], target_weight_coef_N[rows]
        sum_CD, self.product_CD = self.product_CD, None
        for piece in blocks(out_CD.shape[0], self.plan.product_rows):
            of_piece = row[piece]
            if sum_CD is None:
                product_CD = self._empty(piece.stop - piece.start, self.plan.sum_dtype)
                for each in tiles:
                    weight_BD = self.operand.weight(each.classes)
                    product(product_CD, each.exp_CB[piece], weight_BD, add=each.classes.start > 0)
            else:
                product_CD = sum_CD[piece]
            of_rows = of_piece, row_scale_C[piece], target_weight_coef_C[piece]
            self.rows_of_product(product_CD, out_CD[piece], *of_rows, self.dx.applied)
            del product_CD  # free it before the next product is allocated

    def rows_of_product(
        self,
        product_CD: Tensor,
        out_CD: Tensor,
        row: RowCoefs,
        row_scale_C: Tensor,
        target_weight_coef_C: Tensor,
        factor: Tensor | None = None,
    ) -> None:
        """Write rows of dX times a factor to out_CD from their product, which may be out_CD."""
        row_kernels.input_gradient(
            product_CD,
            self.operand.weight_VD,
            row.target_N,
            row.ignored_N,
            row_scale_C,
            target_weight_coef_C,
            row.smoothing_coef_N,
            self.total_weight_D,
            factor,
            out_CD,
        )

    def _empty(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(rows, self.operand.D, dtype=dtype, device=self.operand.weight_VD.device)
