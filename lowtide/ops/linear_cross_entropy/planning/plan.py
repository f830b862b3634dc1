"""Define the plan of a call."""

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from lowtide.ops.linear_cross_entropy.definition.head import Options
from lowtide.ops.linear_cross_entropy.planning.agreement import Agreement
from lowtide.ops.linear_cross_entropy.planning.call import CallKind, NeedsGrad, backend_of

# How a weight gradient is formed: by a single GEMM over all tokens that rounds in its epilogue; by
# adding each chunk's GEMM to a tensor of the sum's dtype; the same with a sum partly in the
# gradient's memory; or by blocks of classes, each rounded once.
WeightGradient = Literal["single_product", "accumulate", "packed", "class_blocks"]


@dataclass(frozen=True)
class Tiling:
    """Hold the sizes of chunks and blocks, and how the weight gradient is formed."""

    rows: int
    """Tokens per chunk."""
    chunk_classes: int
    """Classes of a chunk at a time; V, except in the exponentials engine with "class_blocks"."""
    operand_classes: int
    """Classes whose weight rows are copied at a time; V if no copy is needed."""
    product_rows: int
    """Most rows of one dX GEMM in the exponentials engine."""
    weight_gradient: WeightGradient
    """Names the way to form the first term's weight gradient; those of others are accumulated."""
    sum_bits: int
    """Bits of a sum that lies partly in the gradient's memory ("packed"), on CUDA."""
    block_rows: int = 0
    """Tokens per chunk of a class block ("class_blocks")."""
    block_classes: int = 0
    """Classes per block ("class_blocks")."""
    stored_rows: int = 0
    """Tokens whose exponentials stay in the weight gradient's memory ("class_blocks", exponentials)."""


@dataclass(frozen=True, kw_only=True)
class Plan(Tiling):
    """Hold every decision about one call; forward and backward follow it."""

    options: Options
    call_kind: CallKind
    workspace: int
    """Bytes that the call may hold beyond inputs, outputs and gradients."""
    compute_dtype: torch.dtype
    """Dtype of the GEMM operands.

    This is the options' dtype. For half precision on the CPU it is float32, except in
    cpu_exponentials/engine.py.
    """
    copies_rows: tuple[bool, ...]
    """One flag per term: True if a chunk of the input is copied, for its dtype or its strides."""
    scales_in_gradient: tuple[bool, ...]
    """One flag per term: True if a chunk's rows, scaled for dW, fit in the memory of its dX.

    See exponentials/linear_term.py.
    """
    skips_ignored: bool = False
    """True if rows are put in an order in which ignored ones come last, and kernels end before those."""
    agreement: Agreement | None = None
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

    @property
    def one_product_of_logits(self) -> bool:
        """Return True if engines/logits/one_product.py computes the call."""
        return self.engine == "logits_triton" and self.weight_gradient == "single_product"

    @functools.cached_property
    def sum_dtype(self) -> torch.dtype:
        """Return float64 for float64, else float32: the dtype of logits, statistics and sums."""
        return self.options.sum_dtype
