"""The soft cap of scores or logits, in torch; triton_helpers.py has it for Triton's kernels."""

from torch import Tensor


def slope_of_tanh(x: Tensor) -> Tensor:
    """1 / cosh^2: 1 - tanh^2 would lose its digits where the cap holds and tanh is near 1."""
    return x.cosh().square_().reciprocal_()
