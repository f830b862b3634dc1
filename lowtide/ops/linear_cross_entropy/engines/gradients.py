"""Allocate the memory of the gradients, and record the factors still to be applied to them.

lowtide/core/pending_gradient.py explains these factors.

Shapes: N tokens, D_k features of term k, V classes; C tokens of a chunk.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowtide.core.elementwise import rounded_in_place
from lowtide.core.pending_gradient import (
    FP16_EXPONENT,
    PendingGradient,
    fp16_exponents_of_rows,
    fp16_headroom_of_input,
    fp16_headroom_of_operand,
    fp16_headroom_of_weight,
    outputs_of,
    power_and_rest,
    scale_into,
    split_factor,
)
from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.planning.operands import follows_columns

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Gradients:
    """Hold the gradients of a head's tensors, with None for a gradient that is not wanted."""

    inputs: tuple[PendingGradient | None, ...]  # each [N, D_k]
    weights: tuple[PendingGradient | None, ...]  # each [V, D_k]
    bias: PendingGradient | None = None  # [V]
    scale: PendingGradient | None = None  # 0-d

    @property
    def all(self) -> tuple[PendingGradient | None, ...]:
        """Return the gradients in the order of Head's tensors."""
        return (*self.inputs, *self.weights, self.bias, self.scale)

    @property
    def outputs(self) -> list[Tensor]:
        """Return an operator's outputs: tensor and remaining factor of each wanted gradient."""
        return outputs_of(each for each in self.all if each is not None)

    def finished(self, tensors: Iterable[Tensor | None], backend: str) -> list[Tensor]:
        """Return the finished gradients of the tensors, which are in the order of `all`."""
        pairs = zip(self.all, tensors)
        return [each.finished(like, backend) for each, like in pairs if each is not None and like is not None]


def no_gradients(head: Head) -> Gradients:
    """Return the gradients of a call that wants none."""
    nothing = (None,) * len(head.inputs)
    return Gradients(nothing, nothing)


def allocate(
    plan: "Plan", head: Head, factor: Tensor, ignored_M: Tensor, *, final: bool, empty: bool, some_rows: bool
) -> Gradients:
    """Allocate memory for the wanted gradients; each is `factor` times what the engine computes.

    `ignored_M`: True for ignored rows, of those that the engine keeps.
    `final`: no upstream gradient will be applied later. `empty`: nothing will be written, so the
    memory is set to 0. `some_rows`: not every row of the input gradients will be written, so their
    memory is set to 0.
    """
    needs_grad = plan.needs_grad
    unscaled = factor  # the gradient of the scale itself does not include the scale
    if head.scale is not None:
        factor = factor * head.scale.to(plan.sum_dtype)

    def of(
        like: Tensor, shape: Sequence[int], factor: Tensor = factor, zero: bool = False, **options: Any
    ) -> PendingGradient:
        options |= {"sum_dtype": plan.sum_dtype, "final": final, "zero": zero or empty}
        return allocate_one(like, shape, factor, **options)

    def of_input(input: Tensor, weight: Tensor) -> PendingGradient:
        # fp16_headroom_of_input needs the largest number of the whole weight. No rank of a sharded
        # head knows it, so there a float16 gradient is kept in the sum's dtype.
        summed = keeps_input_sum(input, plan.options)
        headroom: int | Tensor | None = FP16_EXPONENT
        if input.dtype == torch.float16 and not summed and not final:
            one_chunk = plan.rows >= head.tokens and not empty
            lower = FP16_EXPONENT - fp16_exponents(plan, head)[0]
            headroom = None if one_chunk else fp16_headroom_of_input(weight) - lower
        shape = (head.tokens, input.shape[-1])
        return of(input, shape, summed=summed, zero=some_rows, by_row=by_row, headroom=headroom)

    def of_weight(k: int, input: Tensor, weight: Tensor) -> PendingGradient:
        summed, headroom = accumulate or k > 0, FP16_EXPONENT
        if weight.dtype == torch.float16 and not summed:
            if single_product:
                # All rows are kept. X of ignored ones may be large, or not finite.
                ignored = ignored_M.view(input.shape[:-1])
                headroom = fp16_headroom_of_operand(input, fp16_exponents(plan, head)[1], ignored)
            else:
                headroom = fp16_headroom_of_weight(input)
        given: dict[str, Any] = {"headroom": headroom, "in_operand": single_product}
        given["by_columns"] = follows_columns(weight, plan.options)
        return of(weight, weight.shape, summed=summed, by_row=by_row and not class_blocks, **given)

    accumulate, class_blocks, single_product = (
        plan.weight_gradient == kind for kind in ("accumulate", "class_blocks", "single_product")
    )
    by_row = plan.exponentials
    terms = [*zip(head.inputs, head.weights)]
    return Gradients(
        tuple(of_input(*term) if grad else None for term, grad in zip(terms, needs_grad.inputs)),
        tuple(
            of_weight(k, *term) if grad else None
            for k, (term, grad) in enumerate(zip(terms, needs_grad.weights))
        ),
        of(head.bias, (head.classes,), summed=True, zero=True) if needs_grad.bias else None,
        of(head.scale, (), unscaled, summed=True, zero=True) if needs_grad.scale else None,
    )


def allocate_one(
    like: Tensor,
    shape: Sequence[int],
    factor: Tensor,
    *,
    sum_dtype: torch.dtype,
    summed: bool,
    final: bool,
    zero: bool = False,
    by_row: bool = False,
    headroom: int | Tensor | None = FP16_EXPONENT,
    in_operand: bool = False,
    by_columns: bool = False,
) -> PendingGradient:
    """Allocate the gradient of `like`, and split its factor into what is applied and what remains.

    `summed`: the gradient is kept in the sum's dtype until backward. `final`: no upstream gradient
    will be applied later. `by_row`: the engine multiplies each row by a factor of its own, and
    applies the shared factor with it. `headroom` is None for the float16 gradient of an input in
    one chunk: its factor is split by the chunk's float32 rows. `in_operand`: what is applied
    multiplies an operand of a single GEMM, so of a float16 factor it is a power of two.
    `by_columns`: the gradient's columns are contiguous.
    """
    kept = sum_dtype if summed else like.dtype
    make = torch.zeros if zero else torch.empty
    tensor = make(shape[::-1] if by_columns else shape, dtype=kept, device=like.device)
    tensor = tensor.t() if by_columns else tensor
    if _waits(like.dtype, kept, sum_dtype, by_row=by_row):
        return PendingGradient(tensor, None, factor)
    if headroom is None:
        return PendingGradient(tensor, unsplit=factor)
    if in_operand and like.dtype == torch.float16:
        return PendingGradient(tensor, *power_and_rest(factor, headroom))
    applied, remaining = (factor, None) if final else split_factor(factor, like.dtype, headroom)
    return PendingGradient(tensor, applied, remaining)


def _waits(dtype: torch.dtype, kept: torch.dtype, sum_dtype: torch.dtype, *, by_row: bool) -> bool:
    """Return True if the whole factor is left for backward."""
    return kept == sum_dtype and not (by_row and dtype == sum_dtype)


def unwritten(
    like: Tensor,
    shape: Sequence[int],
    *,
    sum_dtype: torch.dtype,
    summed: bool,
    by_row: bool = False,
    by_columns: bool = False,
) -> list[Tensor]:
    """Return an operator's outputs for what `allocate_one` allocates, without their numbers."""
    tensor = like.new_empty(shape[::-1] if by_columns else shape, dtype=sum_dtype if summed else like.dtype)
    tensor = tensor.t() if by_columns else tensor
    remains = like.dtype == torch.float16 or _waits(like.dtype, tensor.dtype, sum_dtype, by_row=by_row)
    return [tensor, like.new_empty((), dtype=sum_dtype) if remains else tensor.new_empty(0)]


def keeps_input_sum(input: Tensor, options: Options) -> bool:
    """Return True if an input gradient is kept in the sum's dtype until backward."""
    return options.sharded and input.dtype == torch.float16


def fp16_exponents(plan: "Plan", head: Head) -> tuple[int, int]:
    """Return the powers of two of float16 coefficients, and below which a single GEMM has X."""
    if plan.weight_gradient == "single_product" and head.weights[0].dtype == torch.float16:
        return fp16_exponents_of_rows(head.tokens)
    return FP16_EXPONENT, 0


def as_sums(gradient_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the memory of a half-precision gradient as numbers of the sum's dtype.

    The result is a matrix, or a vector if rows have an odd number. The gradient may lie by columns.
    """
    if not gradient_VD.is_contiguous():
        gradient_VD = gradient_VD.t()
    if gradient_VD.shape[1] % 2 == 0:
        return gradient_VD.view(dtype)
    return gradient_VD.view(-1)[: gradient_VD.numel() // 2 * 2].view(dtype)


class InputRows:
    """Take the rows of an input gradient, a chunk at a time.

    A GEMM writes them into the gradient itself, or into a buffer from which they are rounded.
    """

    def __init__(
        self, dx: PendingGradient, rows: int, sum_dtype: torch.dtype, backend: str, kept_rows: Tensor | None
    ) -> None:
        """Allocate a buffer of `rows` rows; kept_rows is None if all rows are kept."""
        self.dx, self.backend, self.kept_rows = dx, backend, kept_rows
        self.buffer_CD = None
        if dx.applied is not None or dx.unsplit is not None or kept_rows is not None:
            self.buffer_CD = torch.empty(rows, dx.tensor.shape[1], dtype=sum_dtype, device=dx.tensor.device)

    def memory(self, rows: slice) -> Tensor:  # [C, D]
        """Return where the chunk's rows are to be written."""
        return self.dx.tensor[rows] if self.buffer_CD is None else self.buffer_CD[: rows.stop - rows.start]

    def store(self, rows: slice) -> None:
        """Round the chunk's rows from the buffer, if there is one, into the gradient."""
        if self.buffer_CD is None:
            return
        dx, dx_CD = self.dx, self.memory(rows)
        dx.split_by(dx_CD)
        if self.kept_rows is None:
            scale_into(dx.tensor[rows], dx_CD, dx.applied, self.backend, spent=True)
        else:
            dx_CD = dx_CD if dx.applied is None else dx_CD.mul_(dx.applied)
            if dx_CD.dtype != dx.tensor.dtype:
                dx_CD = rounded_in_place(dx_CD, dx.tensor.dtype)
            dx.tensor[self.kept_rows[rows]] = dx_CD
