"""Walk over chunks of rows and blocks of classes, in bounded memory: what all engines share.

For a chunk of C tokens, U = sum_k X_k W_k^T is computed in float32 and turned into G, the gradient
of U apart from the logit scale, rounded once to the operands' dtype. Two GEMMs per term follow,
which accumulate in float32 themselves:

    dX_k = G W_k,   dW_k += G^T X_k

The factor that all rows share (1/n of a mean, the logit scale) is not applied to G, because it
would round every target column with the same error.

`Engine` has no pass over the logits of its own. An engine adds one in one of three ways:

* It stores a chunk's logits: it writes `chunk_buffer`, `columns` and `tile_gradient_`.
* It stores something else in their place: it writes `chunk_gradient_` too.
* It takes its steps in another order: it overrides `walk_tokens` and `walk_classes`.

The engines of the loss derive from LossEngine (loss_engine.py), which is an `Engine`. That of
lowtide/ops/distillation derives from `Engine` itself.

Shapes: N tokens, of which M are kept (not ignored); D_k features of term k, V classes; C tokens of
a chunk, B classes of a block.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.core.matmul import Operand, blocks, product, product_of_rows
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients, InputRows, as_sums
from lowtide.ops.linear_cross_entropy.engines.token_order import TokenOrder
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import (
    WeightAccumulator,
    choose_accumulator,
)
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_torch import SingleProduct


class Engine:
    """Hold one call's operands and walk over them in chunks.

    It holds views, and vectors of N and V elements, but nothing larger. The types of `coefs` and
    `stats` are the engine's own; the walk only takes their rows, by an index.
    """

    def __init__(
        self, plan: Any, operands: list[Operand], rows: int, classes: int, kept_rows: Tensor | None
    ) -> None:
        """Hold an operand for each linear term.

        `rows` is the number of kept rows; kept_rows holds their places, or is None if all are kept.
        The plan is a Tiling with four attributes more: engine, backend, sum_dtype and agreement.
        """
        self.plan, self.operands, self.kept_rows = plan, operands, kept_rows
        self.M, self.V, self.device = rows, classes, operands[0].input.device
        self.trained_terms = len(operands)  # the first ones; others get no gradient
        # Where ranks have tokens of their own: their order, and rows that are read as zeros.
        self.order: TokenOrder | None = None
        self.cleared_N: Tensor | None = None
        self.single_product: SingleProduct | None = None

    def walk(self, coefs: Any, stats: Any, gradients: Gradients, *, take_stats: bool) -> None:
        """Compute the row statistics if asked, and the gradients that are wanted."""
        of_tokens = self.walk_tokens(coefs, stats, gradients, take_stats)
        if gradients.weights[0] is not None and self.plan.weight_gradient == "class_blocks" and self.M:
            self.walk_classes(coefs, stats, gradients, of_tokens)

    def walk_tokens(self, coefs: Any, stats: Any, gradients: Gradients, take_stats: bool) -> Any:
        """Compute what is not formed class by class, a chunk of tokens at a time.

        Return what the walk over classes needs of it.
        """
        plan = self.plan
        if plan.agreement is not None:
            from lowtide.ops.linear_cross_entropy.engines import sharded_walk

            return sharded_walk.walk_tokens(self, coefs, stats, gradients, take_stats)
        inputs = [self.input_rows(dx) for dx in gradients.inputs]
        sums = [self.accumulator(k, dw) for k, dw in enumerate(gradients.weights)]
        gradient = any(each is not None for each in (*inputs, *sums, gradients.bias, gradients.scale))
        if not gradient and not take_stats:
            return None
        buffer_CV = self.chunk_buffer(gradient)
        bias_sum_V = None if gradients.bias is None else gradients.bias.tensor
        for rows in blocks(self.M, self.chunk_rows(gradient)):
            chunks = [operand.rows(rows) for operand in self.operands]
            z_CV = buffer_CV[: rows.stop - rows.start]
            g_CV = self.chunk_gradient_(
                z_CV, chunks, rows, coefs[rows], stats[rows], take_stats, gradient, bias_sum_V
            )
            for operand, dx in zip(self.operands, inputs):
                if dx is not None:
                    self._input_gradient(operand, g_CV, dx, rows)
            for x_CD, sum in zip(chunks, sums):
                if sum is not None:
                    sum.add_product(g_CV, x_CD, first=rows.start == 0, last=rows.stop == self.M)
            # Copies may be among them; free them before the next ones are made.
            del chunks, g_CV, x_CD
        for sum in sums:
            if sum is not None and self.M:
                sum.finish()
        return None

    def _input_gradient(self, operand: Operand, g_CV: Tensor, dx: InputRows, rows: slice) -> None:
        """Compute the chunk's rows of an input gradient from G."""
        dx_CD = dx.memory(rows)
        for classes, weight_BD in operand.weights(self.plan.operand_classes):
            product_of_rows(dx_CD, g_CV[:, classes], weight_BD, add=classes.start > 0)
        dx.store(rows)

    def walk_classes(self, coefs: Any, stats: Any, gradients: Gradients, of_tokens: Any) -> None:
        """Compute dW[v] = G[:, v]^T X over all tokens, a block of classes at a time, rounded once.

        G is recomputed from the operands and the row statistics.
        """
        plan, dw = self.plan, gradients.weights[0]
        assert dw is not None
        sum_BD = self.buffer(plan.block_classes, self.operands[0].D)
        buffer = self.block_buffer()
        for classes in blocks(self.V, plan.block_classes):
            B = classes.stop - classes.start
            weights = [operand.weight(classes) for operand in self.operands]
            for rows in blocks(self.M, plan.block_rows):
                chunks = [operand.rows(rows) for operand in self.operands]
                z_CB = self.block_of(buffer, rows.stop - rows.start, B)
                for k, (x_CD, weight_BD) in enumerate(zip(chunks, weights)):
                    self.add_term_(z_CB, k, x_CD, weight_BD)
                del chunks[1:], x_CD
                g_CB = self.tile_gradient_(z_CB, coefs[rows], stats[rows], self.columns(rows, classes))
                product(sum_BD[:B], g_CB.t(), chunks[0], add=rows.start > 0)
                del chunks, g_CB
            del weights, weight_BD  # free them before the next ones are made
            pending_gradient.scale_into(dw.tensor[classes], sum_BD[:B], dw.applied, plan.backend, spent=True)

    # Each engine defines these.

    def chunk_buffer(self, gradient: bool) -> Any:  # Tensor [rows, V], or what has an index of rows
        """Return memory for the logits of a chunk, or what the engine has in their place."""
        raise NotImplementedError

    def columns(self, rows: slice, classes: slice = slice(0, None)) -> Any:
        """Return what the pass needs of a tile's columns."""
        raise NotImplementedError

    def tile_gradient_(
        self,
        logits_CB: Any,
        coefs: Any,
        stats: Any,
        columns: Any,
        *,
        take_stats: bool = False,
        gradient: bool = True,
        bias_sum_B: Tensor | None = None,
    ) -> Any:  # Tensor [C, B]; None without a gradient
        """Turn a tile's float32 logits into their gradient, in place.

        With `take_stats` compute the row statistics first, from a tile of all classes. Add the sum
        of the gradient's rows to `bias_sum_B`, if given: before they are rounded, if they are
        rounded here.
        """
        raise NotImplementedError

    # An engine may override these.

    def chunk_rows(self, gradient: bool) -> int:
        """Return the number of tokens in a chunk."""
        return int(self.plan.rows)

    @property
    def parts(self) -> list[slice]:
        """Return the parts of this rank's classes whose logits are computed apart."""
        return [slice(0, self.V)]

    def accumulator(
        self, place: int, dw: pending_gradient.PendingGradient | None
    ) -> WeightAccumulator | None:
        """Return the accumulator of the term at that place in the head; None if there is none."""
        return choose_accumulator(self.plan, place, dw)

    def chunk_gradient_(
        self,
        buffer_CV: Any,
        chunks: list[Tensor],
        rows: slice,
        coefs: Any,
        stats: Any,
        take_stats: bool,
        gradient: bool,
        bias_sum_V: Tensor | None,
    ) -> Any:  # Tensor [C, V], in the buffer's memory; None without a gradient
        """Compute the chunk's logits, then their row statistics, their gradient, or both."""
        self.logits_into(buffer_CV, chunks)
        del chunks[self.trained_terms :]
        columns, options = self.columns(rows), {"take_stats": take_stats, "gradient": gradient}
        return self.tile_gradient_(buffer_CV, coefs, stats, columns, **options, bias_sum_B=bias_sum_V)

    def logits_into(self, buffer_CV: Any, chunks: list[Tensor]) -> None:
        """Write the logits of a chunk to the buffer.

        Each part of the classes has its own GEMM, so that the bits of its logits do not depend on
        the other classes.
        """
        for k, (operand, x_CD) in enumerate(zip(self.operands, chunks)):
            for part in self.parts:
                for classes, weight_BD in operand.weights(self.plan.operand_classes, part):
                    self.add_term_(buffer_CV[..., classes], k, x_CD, weight_BD)
                    del weight_BD  # free a copy before the next term's is made

    def add_term_(self, logits_CB: Any, k: int, x_CD: Tensor, weight_BD: Tensor) -> None:
        """Add the product of term k to a tile of logits; the first one overwrites it."""
        product(logits_CB, x_CD, weight_BD.t(), add=k > 0)

    def block_buffer(self) -> Any:
        """Return memory for the logits of a block of classes."""
        return self.buffer(self.plan.block_rows * self.plan.block_classes)

    def block_of(self, buffer: Any, rows: int, classes: int) -> Any:  # [C, B]
        """Return that memory as a tile of this size."""
        return buffer[: rows * classes].view(rows, classes)

    # Engines call these.

    def form_at_once(
        self, dw: pending_gradient.PendingGradient, *, width: int, known: float = 1.0, heads: int = 1
    ) -> SingleProduct:
        """Return the accumulator of dW as a single GEMM, which has memory for a chunk's logits.

        `known` is what the host knows of 1 / factor; of a float16 one a power of two is applied,
        which it need not know. Rows of logits begin `width` numbers apart.
        """
        assert dw.applied is not None
        share = 1.0 if dw.tensor.dtype == torch.float16 else known
        memory = as_sums(dw.tensor, self.plan.sum_dtype).view(-1)
        sizes = {"tokens": self.M, "rows": self.plan.rows, "width": width, "heads": heads}
        self.single_product = SingleProduct(dw.tensor, dw.applied, memory, share=share, **sizes)
        return self.single_product

    def input_rows(self, dx: pending_gradient.PendingGradient | None) -> InputRows | None:
        """Return what takes the rows of an input gradient, if it is wanted."""
        if dx is None:
            return None
        return InputRows(dx, self.plan.rows, self.plan.sum_dtype, self.plan.backend, self.kept_rows)

    def buffer(self, *size: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return uninitialised memory, in the accumulators' dtype if none is given."""
        return torch.empty(size, dtype=dtype or self.plan.sum_dtype, device=self.device)
