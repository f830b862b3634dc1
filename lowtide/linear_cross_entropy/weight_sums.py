"""The sum over chunks that becomes the weight's gradient, on the path without a pass: in float32, or in 24
bits where four bytes a weight do not fit the workspace and one does.

Shapes: N tokens, D features; B classes of a block, or all; C tokens of a chunk.
"""

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import row_kernels, scaling, sum_kernels
from lowtide.linear_cross_entropy.operands import product


class FloatSum:
    """In a float32 tensor of its own, or in the gradient's where that is float32."""

    def __init__(self, sum_BD: Tensor) -> None:
        self.sum_BD = sum_BD

    def add_product(self, exp_CB: Tensor, x_CD: Tensor, *, first: bool) -> None:
        product(self.sum_BD, exp_CB.t(), x_CD, add=not first)

    def add_target_rows(
        self, x: Tensor, hit_N: Tensor, class_N: Tensor, order_N: Tensor, *, first_class: int = 0
    ) -> None:
        row_kernels.add_target_rows(self.sum_BD, None, x, hit_N, class_N, order_N, first_class=first_class)

    def subtract_spread(self, class_weight_B: Tensor | None, spread_x_D: Tensor) -> None:
        if class_weight_B is None:
            self.sum_BD.sub_(spread_x_D)
        else:
            self.sum_BD.addr_(class_weight_B, spread_x_D, alpha=-1)

    def round_into(self, out_BD: Tensor, factor: Tensor) -> None:
        scaling.scale_into(out_BD, self.sum_BD, factor, "triton")


class SplitSum:
    """In the memory of the bfloat16 gradient, and a byte beside (sum_kernels.py)."""

    def __init__(self, gradient_VD: Tensor) -> None:
        self.high_VD = gradient_VD.view(torch.int16)
        self.low_VD = torch.empty_like(self.high_VD, dtype=torch.uint8)
        self.spread: tuple[Tensor | None, Tensor | None] = (None, None)

    def add_product(self, exp_CV: Tensor, x_CD: Tensor, *, first: bool) -> None:
        sum_kernels.add_product(self.high_VD, self.low_VD, exp_CV, x_CD, add=not first)

    def add_target_rows(self, x: Tensor, hit_N: Tensor, class_N: Tensor, order_N: Tensor) -> None:
        row_kernels.add_target_rows(self.high_VD, self.low_VD, x, hit_N, class_N, order_N, first_class=0)

    def subtract_spread(self, class_weight_V: Tensor | None, spread_x_D: Tensor) -> None:
        self.spread = (class_weight_V, spread_x_D)  # on the way out: the sum is not read for it

    def round_in_place(self, factor: Tensor) -> None:
        sum_kernels.round_(self.high_VD, self.low_VD, factor, *self.spread)
