"""The sum over chunks that becomes the weight's gradient, on the path without a pass: in float32; in 24 bits,
where four bytes a weight do not fit the workspace and one does; or none, where one chunk has all tokens.

Shapes: N tokens, D features; B classes of a block, or all; C tokens of a chunk; T targets, in order of class.
"""

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import row_kernels, scaling, sum_kernels
from lowtide.linear_cross_entropy.operands import product
from lowtide.linear_cross_entropy.workspace import TARGETS


class FloatSum:
    """In a float32 tensor of its own, or in the gradient's where that is float32."""

    factor: Tensor | None = None
    """What is to go into the rows of the products' second operand."""

    def __init__(self, sum_BD: Tensor, rounding: Tensor | None = None) -> None:
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

    def round_in_place(self) -> None:
        """Later, by the factor that backward brings."""

    def round_into(self, out_BD: Tensor, factor: Tensor) -> None:
        scaling.scale_into(out_BD, self.sum_BD, factor, "triton")


class SplitSum:
    """In the memory of the bfloat16 gradient, and a byte beside (sum_kernels.py)."""

    factor = None

    def __init__(self, gradient_VD: Tensor, rounding: Tensor) -> None:
        self.high_VD = gradient_VD.view(torch.int16)
        self.low_VD = torch.empty_like(self.high_VD, dtype=torch.uint8)
        self.rounding = rounding
        self.spread: tuple[Tensor | None, Tensor | None] = (None, None)

    def add_product(self, exp_CV: Tensor, x_CD: Tensor, *, first: bool) -> None:
        sum_kernels.add_product(self.high_VD, self.low_VD, exp_CV, x_CD, add=not first)

    def add_target_rows(self, x: Tensor, hit_N: Tensor, class_N: Tensor, order_N: Tensor) -> None:
        row_kernels.add_target_rows(self.high_VD, self.low_VD, x, hit_N, class_N, order_N)

    def subtract_spread(self, class_weight_V: Tensor | None, spread_x_D: Tensor) -> None:
        self.spread = (class_weight_V, spread_x_D)  # on the way out: the sum is not read for it

    def round_in_place(self) -> None:
        sum_kernels.round_(self.high_VD, self.low_VD, self.rounding, *self.spread)


class RoundedProduct:
    """One product has all tokens, and leaves as the rounded gradient. The rows of classes that are a target,
    to which more is added in float32, are formed again by themselves: at most one a token."""

    def __init__(self, gradient_VD: Tensor, rounding: Tensor) -> None:
        self.gradient_VD, self.factor = gradient_VD, rounding

    def add_product(self, exp_NV: Tensor, x_ND: Tensor, *, first: bool) -> None:
        assert first
        self.operands = (exp_NV, x_ND)
        product(self.gradient_VD, exp_NV.t(), x_ND)

    def add_target_rows(self, x: Tensor, hit_N: Tensor, class_N: Tensor, order_N: Tensor) -> None:
        exp_NV, x_ND = self.operands
        del self.operands
        hit_N = hit_N * self.factor
        targets = min(TARGETS, class_N.shape[0])
        sum_TD = torch.empty(targets, x_ND.shape[1], dtype=hit_N.dtype, device=hit_N.device)
        for start in range(0, class_N.shape[0], TARGETS):
            class_T = class_N[start : start + TARGETS].clamp(max=exp_NV.shape[1] - 1)  # of ignored rows
            T = class_T.shape[0]
            product(sum_TD[:T], exp_NV.index_select(1, class_T).t(), x_ND)
            row_kernels.add_target_rows(
                self.gradient_VD,
                None,
                x,
                hit_N,
                class_N,
                order_N,
                sums_TD=sum_TD[:T],
                first_target=start,
            )

    def subtract_spread(self, class_weight_V: Tensor | None, spread_x_D: Tensor) -> None:
        raise AssertionError("with label smoothing there is a sum")

    def round_in_place(self) -> None:
        """It is rounded."""
