"""Define the plan of a call."""

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from lowtide.ops.linear_cross_entropy.definition.head import Head, Options
from lowtide.ops.linear_cross_entropy.planning.call import Call, CallKind, NeedsGrad, backend_of
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess
from lowtide.ops.linear_cross_entropy.planning.tiling import Tiling, WeightGradient

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement


@dataclass(frozen=True, kw_only=True)
class Plan(Tiling):
    """Hold every decision about one call; forward and backward follow it."""

    options: Options
    call_kind: CallKind
    workspace: int
    """Bytes that the call may hold beyond inputs, outputs and gradients."""
    access: OperandAccess
    one_product_of_logits: bool = False
    """True if engines/logits/one_product.py computes the call."""
    agreement: "Agreement | None" = None
    """Holds what the ranks agreed on, if the head is sharded."""

    @property
    def needs_grad(self) -> NeedsGrad:
        return self.call_kind.needs_grad

    @property
    def engine(self) -> str:
        return self.options.engine

    @property
    def backend(self) -> str:
        return backend_of(self.engine)

    @property
    def exponentials(self) -> bool:
        return self.engine == "exponentials"

    @property
    def soft_targets(self) -> bool:
        return self.engine == "soft_targets"

    @property
    def cpu_exponentials(self) -> bool:
        return self.engine == "cpu_exponentials"

    def call(self, head: Head) -> Call:
        """Return the call of a head that this plan is for."""
        return Call(head, self.options, self.call_kind)

    def agreed(self, agreement: "Agreement") -> "Plan":
        """Return the plan with the chunks that ranks have agreed on."""
        whole = agreement.rows >= max(agreement.tokens)
        divides = self.weight_gradient == "single_product" and not whole
        way: WeightGradient = "class_blocks" if divides else self.weight_gradient
        return replace(self, rows=agreement.rows, weight_gradient=way, agreement=agreement)

    @functools.cached_property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of the GEMM operands."""
        return self.access.dtype

    @functools.cached_property
    def sum_dtype(self) -> torch.dtype:
        """Return float64 for float64, else float32: the dtype of logits, statistics and sums."""
        return self.options.sum_dtype
