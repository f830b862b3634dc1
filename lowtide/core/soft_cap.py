"""Compute the slope of a soft cap in torch; triton_helpers.py does so for Triton kernels."""

from torch import Tensor


def slope_of_tanh(x: Tensor) -> Tensor:
    """Return 1 / cosh(x)^2.

    1 - tanh(x)^2 would lose its digits where the cap is reached and tanh is near 1.
    """
    return x.cosh().square_().reciprocal_()
