"""Choose the accumulator of a weight gradient.

Shapes: N tokens, D features, V classes; C tokens of a chunk.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import in_torch
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.in_torch import RowNumbers
from lowtide.ops.linear_cross_entropy.planning.byte_counts import forms_targets_again
from lowtide.ops.linear_cross_entropy.planning.operands import TILED


class WeightAccumulator(Protocol):
    """Add up dW over the chunks of tokens."""

    factor: Tensor | None
    """Multiplies the rows of x before `add_product`, by the caller; None for 1."""
    ends_early: bool
    """True if `add_product` reads no rows but those that count."""

    def add_product(
        self, g_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool, counted: CountedChunk = ALL
    ) -> None:
        """Add g_CV^T x_CD; the first chunk overwrites what was there.

        Rows of x_CD that do not count are zeros.
        """

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: RowNumbers) -> None:
        """Add coef[n] x[n] to the class of each row n in `order`; class_N is in that order."""

    def subtract_outer(self, class_weight_V: Tensor | None, row_D: Tensor) -> None:
        """Subtract the outer product of the class weights, or of ones, and a row."""

    def finish(self) -> None:
        """Leave the gradient in its memory, without the remaining factor."""


def choose_accumulator(
    plan: Any,
    place: int,
    dw: PendingGradient | None,
    multiply: Callable[..., None] = in_torch.multiply_transposed,
) -> WeightAccumulator | None:
    """Return the accumulator of the term at that place in the head, for the walk over tokens.

    None if its gradient is not wanted, or is formed class by class. `multiply` is the GEMM of a sum
    in torch.
    """
    kind = plan.weight_gradient if place == 0 else "accumulate"
    if dw is None or kind == "class_blocks":
        return None
    if plan.engine not in TILED:
        if kind == "packed":
            return in_torch.InPlaceSum(dw.tensor, dw.applied, multiply)
        if kind == "single_product":
            return in_torch.RoundedBlocks(dw.tensor, dw.applied, plan.block_classes, multiply)
        return in_torch.FloatSum((slice(0, dw.tensor.shape[0]), dw.tensor), multiply=multiply)
    from lowtide.ops.linear_cross_entropy.engines.weight_gradient import accumulators  # imports Triton

    if kind == "packed":
        beside, agreement = 0, plan.agreement
        if agreement is not None and agreement.group.size > 1 and plan.needs_grad.inputs[place]:
            beside = plan.rows * dw.tensor.shape[1] * plan.sum_dtype.itemsize
        return accumulators.PackedSum(dw.tensor, dw.applied, bits=plan.sum_bits, beside=beside)
    if kind == "single_product":
        ends_early = not forms_targets_again(plan.rows, dw.tensor.shape[1])
        return accumulators.RoundedProduct(dw.tensor, dw.applied, ends_early=ends_early)
    return accumulators.TritonFloatSum(dw.tensor, dw.applied)
