"""Apply the factor that all rows share (1/n times the upstream gradient), with one rounding.

A gradient kept in half precision is rounded before the upstream gradient is known. So the factor is
split in two. The first part is applied when the gradient is rounded. The second part, a power of
two, is left for backward: a product with it is exact. (An upstream gradient that is not a power of
two causes a second rounding.) The split also keeps float16 numbers away from the ends of their
range, which 1/n or a loss scale could reach.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core import torch_private
from lowtide.core.checks import HALVES
from lowtide.core.kernels.devices import frexp

# A float16 gradient is formed so that its largest row is near 2^14, and kept so that it is near 1.
FP16_EXPONENT = 14
FP16_MOST = torch.finfo(torch.float16).max
# The numbers of a float16 input gradient are at most 4 times this power of two.
FP16_ROOM = 10

# Types of tensors that backward may write to. Operations on any other type are traced, or that type
# wraps tensors.
_written = {Tensor}


@dataclass(slots=True)
class PendingGradient:
    """Hold an unfinished gradient, the factor applied to it, and the factor that remains."""

    tensor: Tensor
    """The memory, in the gradient's dtype or a wider one."""
    applied: Tensor | None = None
    """The factor applied as `tensor` is computed or its float32 sum is rounded; None for 1."""
    remaining: Tensor | None = None
    """The factor still to be applied; None for 1."""
    unsplit: Tensor | None = None
    """The whole factor, where `split_by` divides it once the gradient's float32 sum is there."""

    def split_by(self, sum: Tensor) -> None:
        """Divide the whole factor, so that the largest number of the sum is kept near 1.

        The sum of few rows has far fewer numbers than the weight that bounds them.
        """
        if self.unsplit is not None:
            largest = frexp(_largest(sum))[1]
            self.applied, self.remaining = split_factor(self.unsplit, self.tensor.dtype, largest)
            self.unsplit = None

    def finished(self, like: Tensor, backend: str) -> Tensor:
        """Return the gradient of `like`, in the memory of `tensor` if the dtype allows it."""
        whole = scaled(self.tensor, self.remaining, like.dtype, backend, in_place=True)
        return whole.view(like.shape)


def outputs_of(gradients: Iterable[PendingGradient]) -> list[Tensor]:
    """Return the gradients as an operator's outputs: for each its tensor and its remaining factor.

    An empty factor stands for 1. Gradients may share a factor, but the outputs of an operator may
    share no memory. So all gradients but the first return a copy of a shared factor.
    """
    outputs, returned = [], set()
    for each in gradients:
        factor = each.tensor.new_empty(0) if each.remaining is None else each.remaining
        outputs += [each.tensor, factor.clone() if id(factor) in returned else factor]
        returned.add(id(each.remaining))
    return outputs


@contextlib.contextmanager
def finishing_as_eager(kind: type[Tensor]) -> Iterator[None]:
    """Finish gradients of this type like those of Tensor; an estimate has such stand-ins."""
    _written.add(kind)
    try:
        yield
    finally:
        _written.discard(kind)


def finish_gradients(
    outputs: Iterable[Any],
    grad_output: Tensor,
    tensors: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
    backend: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each tensor, or None, in backward: tensor * factor * grad_output.

    tensor and factor are an operator's outputs for each gradient; a factor of 1 may be None or an
    empty tensor. Each gradient is rounded once.
    """
    each = iter(outputs)
    wanted = [like if grad else None for like, grad in zip(tensors, needs_grad)]
    pending = [(next(each), next(each), like) for like in wanted if like is not None]
    if torch.compiler.is_compiling() or not _written.issuperset([type(tensor) for tensor, *_ in pending]):
        finished = [_finish_traced(*one, grad_output) for one in pending]
    else:
        # If the graph is freed, its tensors may be overwritten; if it is retained, they will be
        # read again.
        in_place = not torch_private.keeps_graph()
        finished = finish_eagerly(pending, grad_output, backend, in_place=in_place)
    in_order = iter(finished)
    return tuple(None if like is None else next(in_order) for like in wanted)


def finish_eagerly(
    pending: Iterable[tuple[Tensor, Tensor | None, Tensor]],
    grad_output: Tensor,
    backend: str,
    *,
    in_place: bool,
) -> list[Tensor]:
    """Return the gradient of each (tensor, factor, like), where no graph is traced.

    With `in_place` a gradient takes the tensor's memory, if its dtype allows it.
    """
    scalings, likes = [], []
    for tensor, factor, like in pending:
        first, second = grad_output, None
        if factor is not None and factor.numel():
            first, second = factor, grad_output
        scalings.append(_scaling(tensor, first, like.dtype, second, in_place=in_place))
        likes.append(like)
    _scale_all(scalings, backend, spent=in_place)
    return [each.out.reshape(like.shape) for each, like in zip(scalings, likes)]


def _finish_traced(tensor: Tensor, factor: Tensor | None, like: Tensor, grad_output: Tensor) -> Tensor:
    whole = grad_output if factor is None or not factor.numel() else factor * grad_output
    return (tensor.to(whole.dtype) * whole).to(like.dtype).reshape(like.shape)


def fp16_scale(
    find_largest: Callable[[], Tensor], dtypes: Collection[torch.dtype], exponent: int = FP16_EXPONENT
) -> Tensor | None:
    """Return the power of two that brings the largest coefficient near 2^14, or this power of two.

    Return None if no dtype is float16.
    """
    if torch.float16 not in dtypes:
        return None
    largest = find_largest()
    found = frexp(largest)[1].clamp(min=-100)  # smaller numbers are 0 in float16 at any scale
    return _power_of_two(exponent - found, largest.dtype)


def split_factor(
    factor: Tensor, dtype: torch.dtype, headroom: int | Tensor = FP16_EXPONENT
) -> tuple[Tensor, Tensor | None]:
    """Split `factor` in two: one is applied when a gradient is rounded to dtype, one remains.

    The remaining factor is a power of two, which backward applies; None stands for 1.
    """
    if dtype != torch.float16:
        return factor, None
    mantissa, exponent = frexp(factor)
    divisor = 2.0**-headroom if isinstance(headroom, int) else _power_of_two(-headroom, factor.dtype)
    return mantissa * divisor, _power_of_two(exponent + headroom, factor.dtype)


def power_and_rest(factor: Tensor, headroom: int | Tensor) -> tuple[Tensor, Tensor]:
    """Return 2^-headroom, which multiplies a float16 operand and rounds nothing, and the rest."""
    if isinstance(headroom, int):
        return torch.full_like(factor, 2.0**-headroom), factor * 2.0**headroom
    return _power_of_two(-headroom, factor.dtype), factor * _power_of_two(headroom, factor.dtype)


def _power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent, by one kernel less than ldexp."""
    # With a Python number the power would have torch's default dtype, which may be float16.
    return torch.pow(exponent.new_full((), 2, dtype=dtype), exponent)


def fp16_headroom_of_input(weight_VD: Tensor) -> int | Tensor:
    """Return the exponent that `split_factor` takes for the float16 gradient of an input.

    The rows of that gradient are weighted sums of the weight's rows. The factors of a sum are
    scaled so that the largest is near 2^14, and add up to at most about 4 times that. So the
    largest number of the weight bounds the gradient, and the exponent brings this bound into
    float16's range. It also keeps a gradient from being rounded to 0 if the weight or the factors
    are small.
    """
    if weight_VD.numel() == 0:
        return FP16_EXPONENT
    return frexp(_largest(weight_VD))[1] + (FP16_EXPONENT - FP16_ROOM)


def fp16_headroom_of_weight(input: Tensor, ignored: Tensor | None = None) -> int | Tensor:  # [..., D]
    """Return the exponent that `split_factor` takes for the float16 gradient of a weight.

    A number of that gradient is a sum over all rows of the input, with factors up to 2^14. With
    fewer rows this sum has a smaller bound and is scaled down less, so that numbers that are small
    beside the largest factor are not rounded to 0.
    """
    if input.numel() == 0:
        return FP16_EXPONENT
    largest = _largest(input, ignored) * (input.numel() // input.shape[-1])
    return frexp(largest)[1].clamp(max=FP16_EXPONENT)


def fp16_exponents_of_rows(rows: int, room: int = 0) -> tuple[int, int]:
    """Return two powers of two if a single GEMM over all rows forms a float16 dW.

    The first is that of the largest coefficients, the second a bound on the numbers of the input.

    cuBLAS may add up parts of its sums in float16. So the sum itself is kept below 2^14, without
    the factor that the GEMM applies. Each operand is brought down by half of the rows' power of
    two, so that neither loses its small numbers: those of rare classes, and those beside one large
    feature. Coefficients with `room` for numbers that are so many powers of two larger are not
    expected to be large in all rows.
    """
    down = max(0, max(rows - 1, 0).bit_length() - room)
    return FP16_EXPONENT - (down + 1) // 2, -(down // 2)


def fp16_headroom_of_operand(input: Tensor, below: int = 0, ignored: Tensor | None = None) -> int | Tensor:
    """Return the exponent that `power_and_rest` takes for the dW of a single GEMM.

    Multiplied by this power, the rows of the input are below 2^below.
    """
    return frexp(_largest(input, ignored))[1] - below if input.numel() else 0


def _largest(tensor: Tensor, ignored: Tensor | None = None) -> Tensor:
    """Return the largest absolute value, without a copy; float16's largest if it is not finite.

    Rows may hold NaN whose neighbours' gradients are to stay finite. Those of [..., D] that are
    `ignored` [...] do not count. The largest of no numbers is 0.
    """
    if tensor.numel() == 0:
        return tensor.new_zeros((), dtype=torch.float32)
    if ignored is not None:
        tensor = torch.linalg.vector_norm(tensor, torch.inf, -1).masked_fill(ignored, 0)
    # In the tensor's own dtype the norm reads it once; in float32 it would copy it first, as abs
    # does.
    return torch.linalg.vector_norm(tensor, torch.inf).float().nan_to_num(FP16_MOST, FP16_MOST)


class Scaling(NamedTuple):
    """Hold what out = factor * second * tensor is computed from; a second factor of None is 1.

    The tensor is dense. out may be the tensor itself.
    """

    out: Tensor
    tensor: Tensor
    factor: Tensor
    second: Tensor | None = None

    @property
    def lie_alike(self) -> bool:
        """Return True if both tensors have the same strides, as Triton's kernel requires."""
        return self.out is self.tensor or self.out.stride() == self.tensor.stride()


def scale_into(out: Tensor, tensor: Tensor, factor: Tensor, backend: str, *, spent: bool = False) -> None:
    """Write factor * tensor to out, computed in factor's dtype and rounded once to out's.

    out may be the tensor itself. `spent` says that the tensor is not read again, and may be
    overwritten.
    """
    _scale_all([Scaling(out, tensor, factor)], backend, spent=spent)


def scaled(
    tensor: Tensor, factor: Tensor | None, dtype: torch.dtype, backend: str, *, in_place: bool
) -> Tensor:
    """Return factor * tensor, rounded once to dtype; a factor of None stands for 1.

    The result is in the tensor's own memory if `in_place` and its dtype allow it.
    """
    if factor is None:
        tensor = tensor.contiguous() if _has_gaps(tensor) else tensor
        return tensor if tensor.dtype == dtype else tensor.to(dtype)
    scaling = _scaling(tensor, factor, dtype, in_place=in_place)
    _scale_all([scaling], backend, spent=in_place)
    return scaling.out


def _scaling(
    tensor: Tensor, factor: Tensor, dtype: torch.dtype, second: Tensor | None = None, *, in_place: bool
) -> Scaling:
    """Return a scaling of the tensor into memory of this dtype: its own if `in_place` allows it."""
    if _has_gaps(tensor):  # as saved-tensor hooks may return one
        tensor, in_place = tensor.contiguous(), True
    own = in_place and tensor.dtype == dtype
    return Scaling(tensor if own else torch.empty_like(tensor, dtype=dtype), tensor, factor, second)


def _scale_all(scalings: Sequence[Scaling], backend: str, *, spent: bool) -> None:
    """Compute each in its factor's dtype, rounded once to that of its out."""
    if backend == "triton" and all(each.tensor.is_cuda and each.lie_alike for each in scalings):
        # torch's kernel for mixed dtypes handles one element at a time and takes three times as
        # long.
        from lowtide.core.kernels.triton_helpers import launch_scalings

        launch_scalings(scalings)
        return
    for out, tensor, factor, second in scalings:
        _scale_in_torch(out, tensor, factor if second is None else factor * second, spent=spent)


def _scale_in_torch(out: Tensor, tensor: Tensor, factor: Tensor, *, spent: bool) -> None:
    if tensor.dim() == 0:
        out.copy_(tensor * factor)
    elif tensor.is_cuda or out.dtype == tensor.dtype == factor.dtype:
        # As a vector of one element the factor takes part in type promotion; a 0-d factor would be
        # rounded to the tensor's dtype.
        torch.mul(tensor, factor.view(1), out=out)
    elif tensor.is_cpu and out.dtype == tensor.dtype and tensor.dtype in HALVES:
        # On the CPU a 0-d factor is not rounded, and the tensor is not converted as a whole.
        torch.mul(tensor, factor.view(()), out=out)
    elif spent and tensor.dtype == factor.dtype:
        out.copy_(tensor.mul_(factor))
    else:
        # The CPU would convert the whole tensor at once. Convert as many rows as fit in the memory
        # of one row of logits, which every workspace has.
        rows = max(1, max(1024, tensor.shape[0]) // max(1, math.prod(tensor.shape[1:])) // 2)
        for out_rows, tensor_rows in zip(out.split(rows), tensor.split(rows)):
            out_rows.copy_(tensor_rows.to(factor.dtype) * factor)


def _has_gaps(tensor: Tensor) -> bool:
    """Return True if the elements leave gaps in memory, which kernels without strides refuse."""
    if tensor.is_contiguous():
        return False
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return reach != tensor.numel()
