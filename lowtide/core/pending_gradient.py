"""Where the factor common to all rows (1/n, the upstream gradient) meets a gradient: late, rounded once.

A gradient kept in half precision is rounded before the upstream gradient is known, so that factor is split:
most of it goes in as the gradient is rounded, and what is left of it for backward is a power of two, which
rounds nothing further; an upstream gradient that is none rounds once more. The same split keeps float16 away
from the ends of its range, wherever 1/n or a loss scale would have put it.
"""

import math
from collections.abc import Callable, Collection

import torch
from torch import Tensor

# A float16 gradient is kept with its largest row near 1, and formed with its largest row near 2^14.
FP16_EXPONENT = 14
# An input's has numbers up to 4 times this power of two.
FP16_ROOM = 10

HALF = (torch.bfloat16, torch.float16)


def lift(find_largest: Callable[[], Tensor], dtypes: Collection[torch.dtype]) -> Tensor | None:
    """The power of two that brings the largest term near 2^14 where float16 is among the dtypes; else
    None."""
    if torch.float16 not in dtypes:
        return None
    largest = find_largest()
    _, exponent = torch.frexp(largest)
    exponent = exponent.clamp(min=-100)  # what is smaller than this is 0 in float16 however it is scaled
    return torch.ldexp(torch.ones_like(largest), FP16_EXPONENT - exponent)


def split(
    factor: Tensor, dtype: torch.dtype, lifted: int | Tensor = FP16_EXPONENT
) -> tuple[Tensor, Tensor | None]:
    """`factor` as (what goes in when a gradient is rounded to dtype, the power of two left for later)."""
    if dtype != torch.float16:
        return factor, None
    mantissa, exponent = torch.frexp(factor)
    one = torch.ones_like(factor)
    return mantissa * torch.ldexp(one, -lifted * one), torch.ldexp(one, exponent + lifted)


def lifted_by(weight_VD: Tensor) -> int | Tensor:
    """Of an input's float16 gradient, for `split`: its rows are sums of the weight's, whose factors add up to
    about 4 at most where they are formed near 2^14, so the largest number there may be says how far they are
    from the end of the range. A small weight's, or where the terms left much room, are not rounded to
    nothing."""
    if weight_VD.numel() == 0:
        return FP16_EXPONENT
    return torch.frexp(_largest(weight_VD)).exponent + (FP16_EXPONENT - FP16_ROOM)


def lifted_by_rows(input: Tensor) -> int | Tensor:  # [..., D]
    """Return the same of a weight's gradient: a number of it is a sum over all rows, with factors up to 2^14.
    Few rows leave room in the range for what is small beside the largest factor."""
    if input.numel() == 0:
        return FP16_EXPONENT
    largest = _largest(input) * (input.numel() // input.shape[-1])
    return torch.frexp(largest).exponent.clamp(max=FP16_EXPONENT)


def _largest(tensor: Tensor) -> Tensor:
    # Not a norm in float32, for which the CPU would copy the tensor, nor abs.
    return torch.maximum(tensor.amax(), -tensor.amin()).float()


def scale_into(out: Tensor, tensor: Tensor, factor: Tensor, backend: str, *, spent: bool = False) -> None:
    """out = factor * tensor in factor's dtype, rounded once to out's; out may be tensor itself. A tensor that
    is spent is read for the last time."""
    if backend == "triton" and tensor.is_cuda:
        # torch's kernel for mixed dtypes takes one element at a time, and three times as long
        from lowtide.core.triton_helpers import scale_into

        scale_into(out, tensor, factor)
    elif tensor.is_cuda or out.dtype == tensor.dtype == factor.dtype:
        # As a vector of one, the factor takes part in type promotion; 0-d, it would be rounded to tensor's
        # dtype.
        torch.mul(tensor, factor.view(1), out=out)
    elif out.dtype == tensor.dtype and tensor.dtype in HALF:
        # On the CPU a 0-d factor is not rounded, and nothing is converted as a whole.
        torch.mul(tensor, factor.view(()), out=out)
    elif spent and tensor.dtype == factor.dtype:
        out.copy_(tensor.mul_(factor))
    else:
        # The CPU would convert the whole tensor at once; a row's logits are in every workspace.
        rows = max(1, max(1024, tensor.shape[0]) // max(1, math.prod(tensor.shape[1:])) // 2)
        for out_rows, tensor_rows in zip(out.split(rows), tensor.split(rows)):
            out_rows.copy_(tensor_rows.to(factor.dtype) * factor)


def scaled(
    tensor: Tensor, factor: Tensor | None, dtype: torch.dtype, backend: str, *, in_place: bool
) -> Tensor:
    """factor * tensor, rounded once to dtype; in tensor's own memory if that may be and is large enough."""
    if not _fills_its_memory(tensor):  # as it may come back from hooks of saved tensors
        tensor, in_place = tensor.contiguous(), True
    if factor is None:
        return tensor if tensor.dtype == dtype else tensor.to(dtype)
    if tensor.dim() == 0:
        return (tensor * factor).to(dtype)
    out = tensor if in_place and tensor.dtype == dtype else torch.empty_like(tensor, dtype=dtype)
    scale_into(out, tensor, factor, backend, spent=in_place)
    return out


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether its numbers lie without gaps, as kernels want them that know no strides."""
    if tensor.is_contiguous():
        return True
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return reach == tensor.numel()
