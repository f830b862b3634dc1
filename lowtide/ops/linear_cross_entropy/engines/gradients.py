"""Allocate the memory of the gradients, and record the factors still to be applied to them.

lowtide/core/pending_gradient.py explains these factors.

Shapes: N tokens, D_k features of term k, V classes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lowtide.core import pending_gradient
from lowtide.ops.linear_cross_entropy.definition.head import Head
from lowtide.ops.linear_cross_entropy.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class Kept:
    """Hold a gradient under way: an accumulator, or a rounded accumulator, and its factors."""

    tensor: Tensor
    """The memory, in the gradient's dtype or a wider one."""
    rounding: Tensor | None
    """The factor applied as `tensor` is computed or its float32 sum is rounded; None for 1."""
    pending: Tensor | None
    """The factor still to be applied; None if there is none."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """Hold the gradients of a head's tensors; None for one that is not wanted."""

    inputs: tuple[Kept | None, ...]  # each [N, D_k]
    weights: tuple[Kept | None, ...]  # each [V, D_k]
    bias: Kept | None = None  # [V]
    scale: Kept | None = None  # 0-d

    @property
    def all(self) -> tuple[Kept | None, ...]:
        """Return them in the order of Head's tensors."""
        return (*self.inputs, *self.weights, self.bias, self.scale)


def no_gradients(head: Head) -> Gradients:
    """Return gradients of which none is wanted."""
    nothing = (None,) * len(head.inputs)
    return Gradients(nothing, nothing)


def allocate(
    plan: Plan, head: Head, factor: Tensor, *, final: bool, empty: bool, some_rows: bool
) -> Gradients:
    """Allocate memory for the wanted gradients; they will be factor times what is computed into it.

    `final`: no upstream gradient follows. `empty`: nothing will be written. `some_rows`: not every
    row of an input gradient will be written.
    """
    wanted = plan.wanted
    unscaled = factor  # the gradient of the scale itself does not include the scale
    if head.scale is not None:
        factor = factor * head.scale.to(plan.sum_dtype)

    def keep(
        like: Tensor,
        shape: tuple[int, ...],
        *,
        summed: bool,
        zero: bool = False,
        by_row: bool = False,
        factor: Tensor = factor,
        lifted: int | Tensor = pending_gradient.FP16_EXPONENT,
    ) -> Kept:
        """Allocate one gradient and divide its factor into what is applied now and what remains.

        `by_row`: its rows are multiplied by factors anyway; fold the shared factor in there.
        """
        whole = like.dtype == plan.sum_dtype
        summed = summed or whole
        tensor = torch.empty(shape, dtype=plan.sum_dtype if summed else like.dtype, device=like.device)
        if zero or empty:
            tensor.zero_()
        if summed and not (by_row and whole):
            return Kept(tensor, None, factor)
        rounding, pending = (factor, None) if final else pending_gradient.split(factor, like.dtype, lifted)
        return Kept(tensor, rounding, pending)

    accumulate, by_class = (plan.weight_gradient == kind for kind in ("accumulate", "by_class"))
    by_row = plan.exponentials
    return Gradients(
        tuple(
            keep(
                input,
                (head.tokens, input.shape[-1]),
                summed=False,
                zero=some_rows,
                by_row=by_row,
                lifted=pending_gradient.lifted_by(weight)
                if input.dtype == torch.float16
                else pending_gradient.FP16_EXPONENT,
            )
            if grad
            else None
            for input, weight, grad in zip(head.inputs, head.weights, wanted.inputs)
        ),
        tuple(
            keep(
                weight,
                tuple(weight.shape),
                summed=accumulate or k > 0,
                by_row=by_row and not by_class,
                lifted=pending_gradient.lifted_by_rows(input)
                if weight.dtype == torch.float16 and k == 0 and not accumulate
                else pending_gradient.FP16_EXPONENT,
            )
            if grad
            else None
            for k, (input, weight, grad) in enumerate(zip(head.inputs, head.weights, wanted.weights))
        ),
        keep(head.bias, (head.classes,), summed=True, zero=True) if wanted.bias else None,
        keep(head.scale, (), summed=True, zero=True, factor=unscaled) if wanted.scale else None,
    )
