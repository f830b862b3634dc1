"""The soft cap of a tile, for every Triton kernel that has one."""

import triton
import triton.language as tl
from torch import Tensor


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


@triton.jit
def _scale_kernel(tensor_ptr, factor_ptr, out_ptr, count, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(factor_ptr)
    if IN_PLACE:  # loss.backward() asks for the gradients as they are: 1 is the usual factor
        count = tl.where(factor == 1.0, 0, count)
    step = tl.num_programs(0) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
        offsets = start + tl.arange(0, BLOCK)
        scaled = tl.load(tensor_ptr + offsets, mask=offsets < count).to(tl.float32) * factor
        tl.store(out_ptr + offsets, scaled.to(out_ptr.dtype.element_ty), mask=offsets < count)


def scale_into(out: Tensor, tensor: Tensor, factor: Tensor) -> None:
    """out = factor * tensor in float32, rounded once; both contiguous, and out may be tensor itself."""
    count, block = tensor.numel(), 4096
    if count:
        # Few enough to be gone at once where there is nothing to do.
        grid = (min(triton.cdiv(count, block), 2048),)
        in_place = out.data_ptr() == tensor.data_ptr()
        _scale_kernel[grid](tensor, factor, out, count, IN_PLACE=in_place, BLOCK=block, num_warps=8)
