"""The soft cap of a tile, for every Triton kernel that has one."""

import triton
import triton.language as tl


@triton.jit
def tanh_and_slope(x):
    """tanh(x) and its slope, each to a few units in the last place, from e = exp(-2 |x|): near 0, where
    (1 - e) / (1 + e) loses its digits, tanh is its series; the slope is 4 e / (1 + e)^2, as 1 - tanh^2 would
    lose its digits where the cap holds."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    inverse = 1.0 / (1.0 + power)
    quotient = (1.0 - power) * inverse
    tanh = tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -quotient, quotient))
    return tanh, 4.0 * power * inverse * inverse
