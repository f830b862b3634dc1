"""Hold Triton functions that several operators' kernels use: the soft cap, and scaling a tensor."""

from collections.abc import Iterable
from typing import Any

import triton
import triton.language as tl

from lowtide.core.kernels.backend import cdiv
from lowtide.core.kernels.launch import remember_launches


@triton.jit
def tanh_and_room(x):
    """Return tanh(x) and 1 - |tanh(x)|, each exact to a few units in the last place.

    With e = exp(-2 |x|) the second is 2 e / (1 + e). Near 0 the first is a series, because 1 minus
    the second would lose digits there.
    """
    square = x * x
    series = x * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    power = tl.exp(-2.0 * tl.abs(x))
    room = 2.0 * power / (1.0 + power)
    quotient = 1.0 - room
    return tl.where(tl.abs(x) < 0.25, series, tl.where(x < 0.0, -quotient, quotient)), room


@triton.jit
def slope_of_tanh(room):
    """Return 1 - tanh^2 from room = 1 - |tanh|.

    Computed as this difference, the slope would lose its digits where the cap is reached.
    """
    return room * (2.0 - room)


@remember_launches
@triton.jit
def _scale_kernel(
    tensor_ptr, other_ptr, factor_ptr, second_ptr, out_ptr, other_out_ptr, count, other_count,
    IN_PLACE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute out = factor * second * tensor, rounded once, and the same of another tensor.

    Grid: programs take blocks in turn.
    """
    factor = tl.load(factor_ptr)
    if second_ptr is not None:
        factor *= tl.load(second_ptr)
    if IN_PLACE:  # loss.backward() passes 1 as the gradient of the loss, the usual factor
        count = tl.where(factor == 1.0, 0, count)
        other_count = tl.where(factor == 1.0, 0, other_count)
    _scale_blocks(tensor_ptr, out_ptr, count, factor, BLOCK)
    if other_ptr is not None:
        _scale_blocks(other_ptr, other_out_ptr, other_count, factor, BLOCK)


@triton.jit
def _scale_blocks(tensor_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        scaled = tl.load(tensor_ptr + offsets, mask=offsets < count).to(tl.float32) * factor
        tl.store(out_ptr + offsets, scaled.to(out_ptr.dtype.element_ty), mask=offsets < count)


def launch_scalings(scalings: Iterable[Any]) -> None:
    """Compute out = factor * second * tensor in float32, rounded once, for each of the scalings.

    core/pending_gradient.py defines a scaling. One launch computes two that have their factors in
    common: those of input and weight, which most losses have.
    """
    waiting = [each for each in scalings if each.tensor.numel()]
    while waiting:
        one = waiting.pop(0)
        place = next((place for place, each in enumerate(waiting) if _are_alike(one, each)), None)
        other = None if place is None else waiting.pop(place)
        count, other_count = one.tensor.numel(), 0 if other is None else other.tensor.numel()
        block = 4096
        # Launch so few programs that they end at once where the factor is 1.
        _scale_kernel[(min(cdiv(max(count, other_count), block), 2048),)](
            one.tensor, None if other is None else other.tensor, one.factor, one.second,
            one.out, None if other is None else other.out, count, other_count,
            IN_PLACE=_is_in_place(one), BLOCK=block, num_warps=8,
        )  # fmt: skip


def _are_alike(one: Any, other: Any) -> bool:
    same = one.factor is other.factor and one.second is other.second
    return same and _is_in_place(one) == _is_in_place(other)


def _is_in_place(scaling: Any) -> bool:
    return bool(scaling.out.data_ptr() == scaling.tensor.data_ptr())
