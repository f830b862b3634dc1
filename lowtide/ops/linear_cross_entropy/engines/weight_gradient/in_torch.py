"""Accumulate a weight gradient over chunks by torch's operations, on any device.

choose.py has the protocol of accumulators, WeightAccumulator. A chunk adds the product g^T x, where
g holds its gradients of logits, or its exponentials. The factor that all rows share has two parts,
`applied` and `remaining` (core/pending_gradient.py).

Shapes: N tokens, D features, V classes, H classes of the first half; B classes of a block; C tokens
of a chunk.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from lowtide.core.elementwise import rounded_in_place, scaled
from lowtide.core.matmul import blocks, product
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk

Part = tuple[slice, Tensor]  # classes, and their sum [B, D]
RowNumbers: TypeAlias = Tensor | slice


def multiply_transposed(out: Tensor, g_CB: Tensor, x_CD: Tensor, *, add: bool) -> None:
    """Write g_CB^T x_CD to out, or add it."""
    product(out, g_CB.t(), x_CD, add=add)


class FloatSum:
    """Accumulate in float32 (float64 for float64), in the gradient itself or beside it."""

    ends_early = False

    def __init__(
        self,
        *parts: Part,
        first_class: int = 0,
        factor: Tensor | None = None,
        multiply: Callable[..., None] = multiply_transposed,
    ) -> None:
        """Hold the parts of the sum and the GEMM that adds to them.

        The classes of a part count from `first_class`. `factor` multiplies every added term; the
        caller has already multiplied the rows of x that `add_product` gets.
        """
        self.first_class = first_class
        self.parts = [part for part in parts if part[1].shape[0]]
        self.factor, self.multiply = factor, multiply

    def add_product(
        self, g_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool, counted: CountedChunk = ALL
    ) -> None:
        for classes, sum_BD in self.parts:
            self.multiply(sum_BD, g_CV[:, classes], x_CD, add=not first)

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: RowNumbers) -> None:
        coef_N = self._times_factor(coef_N)
        for classes, sum_BD in self.parts:
            place_N = class_N - (self.first_class + classes.start)
            here = ((place_N >= 0) & (place_N < sum_BD.shape[0])).nonzero()[:, 0]
            row = order_N[here] if isinstance(order_N, Tensor) else here + (order_N.start or 0)
            sum_BD.index_add_(0, place_N[here], scaled(x[row], coef_N[row, None]))

    def subtract_outer(self, class_weight_V: Tensor | None, row_D: Tensor) -> None:
        row_D, first = self._times_factor(row_D), self.first_class
        for classes, sum_BD in self.parts:
            if class_weight_V is None:
                sum_BD.sub_(row_D)
            else:
                weight_B = class_weight_V[first + classes.start : first + classes.stop]
                sum_BD.addr_(weight_B, row_D, alpha=-1)

    def finish(self) -> None:
        """Do nothing, because the sum is rounded when the `remaining` factor is applied."""

    def _times_factor(self, vector: Tensor) -> Tensor:
        return vector if self.factor is None else vector * self.factor


class InPlaceSum(FloatSum):
    """Accumulate a half-precision gradient, with half of the sum in the gradient's own memory.

    That half is the float32 sum of the first half of the classes. The sum of the other classes has
    memory of its own (decision 0026).
    """

    def __init__(
        self, gradient_VD: Tensor, applied: Tensor, multiply: Callable[..., None] = multiply_transposed
    ) -> None:
        """Allocate the other half. The gradient will be `applied` times the sum, rounded."""
        (V, D), dtype = gradient_VD.shape, applied.dtype
        H = V // 2
        self.gradient_VD, self.applied = gradient_VD, applied
        self.inside_HD = gradient_VD.view(-1)[: 2 * H * D].view(dtype).view(H, D)
        self.beside_BD = torch.empty(V - H, D, dtype=dtype, device=gradient_VD.device)
        parts = (slice(0, H), self.inside_HD), (slice(H, V), self.beside_BD)
        super().__init__(*parts, multiply=multiply)

    def finish(self) -> None:
        """Round `applied` times the sum to the gradient, in the gradient's memory."""
        rounded_in_place(self.inside_HD.mul_(self.applied), self.gradient_VD.dtype)
        self.gradient_VD[self.inside_HD.shape[0] :] = self.beside_BD.mul_(self.applied)


class RoundedBlocks:
    """Form a rounded gradient from one chunk of all tokens, a block of classes at a time.

    The operands of the chunk are read in `finish`. The float32 sum of a block is rounded while it
    is in the cache.
    """

    factor, ends_early = None, False

    def __init__(
        self,
        gradient_VD: Tensor,
        applied: Tensor,
        block_classes: int,
        multiply: Callable[..., None] = multiply_transposed,
    ) -> None:
        """Hold the gradient, which will be `applied` times the sum, and the GEMM of a block."""
        self.gradient_VD, self.applied = gradient_VD, applied
        self.block_classes, self.multiply = block_classes, multiply
        self.targets: tuple[Tensor, Tensor, Tensor, RowNumbers] | None = None
        self.outer: tuple[Tensor | None, Tensor] | None = None

    def add_product(
        self, g_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool, counted: CountedChunk = ALL
    ) -> None:
        assert first, "there is one chunk"
        self.g_CV, self.x_CD = g_CV, x_CD

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: RowNumbers) -> None:
        self.targets = x, coef_N, class_N, order_N

    def subtract_outer(self, class_weight_V: Tensor | None, row_D: Tensor) -> None:
        self.outer = class_weight_V, row_D

    def finish(self) -> None:
        V, D = self.gradient_VD.shape
        sum_BD = self.applied.new_empty(min(self.block_classes, V), D)
        for classes in blocks(V, self.block_classes):
            B = classes.stop - classes.start
            sum = FloatSum((slice(0, B), sum_BD[:B]), first_class=classes.start, multiply=self.multiply)
            sum.add_product(self.g_CV[:, classes], self.x_CD, first=True, last=True)
            if self.targets is not None:
                sum.add_target_rows(*self.targets)
            if self.outer is not None:
                sum.subtract_outer(*self.outer)
            self.gradient_VD[classes] = sum_BD[:B].mul_(self.applied)


class SingleProduct:
    """Form a half-precision gradient by a single GEMM over all tokens, which rounds as it writes.

    The operands of all tokens are kept until `finish`. Nothing is written to the gradient before,
    so its memory holds the float32 logits of a chunk. A chunk of all tokens may be too large for
    it. Its logits have memory of their own then, where g is read as well.

    The gradient includes the factor `applied`. This number is on the device, but a GEMM takes its
    scale from the host. `share` is the part of 1 / applied that the host knows. So the GEMM is
    scaled by 1 / share, and the rows of x are multiplied by applied * share. In float16 this is a
    power of two, and in most other calls 1, which rounds nothing.
    """

    factor, ends_early = None, False

    def __init__(
        self,
        gradient_VD: Tensor,
        applied: Tensor,
        memory: Tensor,
        *,
        tokens: int,
        rows: int,
        share: float,
        width: int,
        heads: int = 1,
    ) -> None:
        """Allocate memory for the operands, and for logits where the gradient has too little.

        `memory` is that of the gradient, as float32 numbers. A chunk has `rows` tokens, and logits
        of so many heads. Rows of logits and of g begin `width` numbers apart.
        """
        (V, D), dtype, device = gradient_VD.shape, gradient_VD.dtype, gradient_VD.device
        self.gradient_VD, self.share = gradient_VD, share
        self.of_x = (applied * share).view(1)
        size = heads * rows * width
        self.g_NV: Tensor | None = None
        if size <= memory.numel():
            self.g_NV = torch.empty(tokens, width, dtype=dtype, device=device)[:, :V]
        else:
            memory = torch.empty(size, dtype=applied.dtype, device=device)
        self.logits = memory[:size].view(heads, rows, width)[..., :V]
        self.x_ND = torch.empty(tokens, D, dtype=dtype, device=device)
        self.kept = 0

    def add_product(
        self, g_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool, counted: CountedChunk = ALL
    ) -> None:
        rows = slice(self.kept, self.kept + g_CV.shape[0])
        if self.g_NV is None:
            assert last, "a chunk of all tokens"
            self.g_NV = g_CV
        else:
            self.g_NV[rows] = g_CV
        torch.mul(x_CD, self.of_x, out=self.x_ND[rows])
        self.kept = rows.stop

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: RowNumbers) -> None:
        raise AssertionError("SingleProduct adds no target rows; RoundedProduct does")

    def subtract_outer(self, class_weight_V: Tensor | None, row_D: Tensor) -> None:
        raise AssertionError("with label smoothing there is a sum")

    def finish(self) -> None:
        """Write the product of the kept operands to the gradient's memory."""
        assert self.g_NV is not None
        product(self.gradient_VD, self.g_NV.t(), self.x_ND, scale=1 / self.share)
