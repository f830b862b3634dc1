"""Compute functions of single numbers in torch: exponentials, products, roundings, a cap's slope.

triton_helpers.py has the slope for Triton kernels.
"""

import math

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


def exp_(x: Tensor) -> Tensor:
    """Replace each number by its exponential, and return the tensor.

    Results below four times the least normal number become 0. A result's bits do not depend on the
    place of its number in the tensor. On a CPU, torch's exp is MKL's. It takes up to 35 times as
    long where results underflow: at -inf, and from -87 down in float32. Scores that a mask hides
    are there, and logits of a sharp head. So numbers are clamped first (decision 0082).
    """
    if x.device.type != "cpu":
        return x.exp_()
    least = torch.finfo(x.dtype).tiny
    return torch.threshold_(x.clamp_(min=math.log(least) + 1).exp_(), 4 * least, 0.0)


def quick_exp_(x: Tensor) -> Tensor:
    """Replace each number by its exponential, by exp2, and return the tensor.

    On a CPU exp2 takes about half of exp's time. Its last bit can depend on the place of a number
    in the tensor. The rounding of x log2(e) adds up to about one unit in the last place of x to
    the exponent.
    """
    return x.mul_(LOG2_E).exp2_() if x.device.type == "cpu" else x.exp_()


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return x times a factor, in the factor's dtype.

    If the dtypes differ, `x * factor` would hold x in the other dtype as well.
    """
    return x * factor if x.dtype == factor.dtype else x.to(factor.dtype).mul_(factor)


def add_row_sum(sum_B: Tensor | None, rows_CB: Tensor | None) -> None:
    """Add the sum of rows to a vector, in the vector's dtype, if there are both."""
    if sum_B is not None and rows_CB is not None:
        sum_B.add_(rows_CB.sum(0, dtype=sum_B.dtype))


def rounded_in_place(x_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """Round rows to a dtype of half their size, in their own memory, and return them there.

    They are contiguous. Row i is read at byte 4 i D and written at byte 2 i D. So rows n to 2 n
    overwrite only rows below n, which have already been read. Row 0 overlaps itself, so it is
    copied first.
    """
    C, first = x_CD.shape[0], 1
    rounded_CD = rows_in_memory(x_CD, dtype)
    rounded_CD[: min(C, 1)] = x_CD[:1].clone()
    while first < C:
        rows = slice(first, min(2 * first, C))
        rounded_CD[rows] = x_CD[rows]
        first = rows.stop
    return rounded_CD


def rows_in_memory(x_CD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of the same shape in a smaller dtype, from the beginning of the rows' memory."""
    return x_CD.view(-1).view(dtype)[: x_CD.numel()].view(x_CD.shape)


def slope_of_tanh(x: Tensor) -> Tensor:
    """Return 1 / cosh(x)^2.

    1 - tanh(x)^2 would lose its digits where the cap is reached and tanh is near 1.
    """
    return x.cosh().square_().reciprocal_()
