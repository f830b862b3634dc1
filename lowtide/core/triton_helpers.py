"""The soft cap of a tile, for every Triton kernel that has one."""

import triton
import triton.language as tl


@triton.jit
def tanh_and_room(x):
    """tanh(x), and 1 - |tanh(x)|, each to a few units in the last place, from e = exp(-2 |x|): the latter is
    2 e / (1 + e). Near 0, where 1 less that loses its digits, tanh is its series."""
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    room = 2.0 * power / (1.0 + power)
    quotient = 1.0 - room
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -quotient, quotient)), room


@triton.jit
def slope_of_tanh(room):
    """1 - tanh^2, of 1 - |tanh|: the difference itself would lose its digits where the cap holds."""
    return room * (2.0 - room)
