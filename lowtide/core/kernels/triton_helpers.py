"""Hold Triton functions that several operators' kernels use: the soft cap, and scaling a tensor."""

import triton
import triton.language as tl
from torch import Tensor

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
    tensor_ptr, factor_ptr, second_ptr, out_ptr, count, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute out = factor * second * tensor, rounded once. Grid: programs take blocks in turn."""
    factor = tl.load(factor_ptr)
    if second_ptr is not None:
        factor *= tl.load(second_ptr)
    if IN_PLACE:  # loss.backward() passes 1 as the gradient of the loss, the usual factor
        count = tl.where(factor == 1.0, 0, count)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        scaled = tl.load(tensor_ptr + offsets, mask=offsets < count).to(tl.float32) * factor
        tl.store(out_ptr + offsets, scaled.to(out_ptr.dtype.element_ty), mask=offsets < count)


def launch_scaling(out: Tensor, tensor: Tensor, factor: Tensor, second: Tensor | None = None) -> None:
    """Write factor * second * tensor to out, computed in float32 and rounded once.

    Both tensors are contiguous, and out may be the tensor itself. A second factor of None stands
    for 1.
    """
    count, block = tensor.numel(), 4096
    if count:
        # Launch so few programs that they end at once where the factor is 1.
        grid = (min(cdiv(count, block), 2048),)
        in_place = out.data_ptr() == tensor.data_ptr()
        _scale_kernel[grid](tensor, factor, second, out, count, IN_PLACE=in_place, BLOCK=block, num_warps=8)
