"""Choose and launch the kernel that computes a chunk's logits z and stores E = exp(z - reference).

gemm_triton.py explains the kernel's operands and results. gemm_gluon.py has the same kernel as a
pipeline.

Shapes: C tokens of a chunk, D features, R features of a second, narrow term; B classes of a block,
or all.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.core.kernels import backend
from lowtide.core.kernels.backend import cdiv
from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import gemm_triton as kernels
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import LogitTransform
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk

Term = tuple[Tensor, Tensor]
# The Gluon pipeline runs GEMMs of at most PIPELINED_FEATURES features, where the epilogue takes a
# large part of the time (decision 0039).
PIPELINED_FEATURES = 1024
NO_TRANSFORM = LogitTransform()


def halves_of_tiles(classes: int) -> int:
    """Return the number of half tiles in a row of `classes` classes."""
    return 2 * cdiv(classes, tiles.BLOCK_B)


class Exponentials:
    """Hold the operands of one chunk and one block of classes, and run the kernel on them."""

    def __init__(
        self,
        first_term: Term,
        second_term: Term | None = None,
        *,
        reference_C: Tensor,
        target_C: Tensor,
        out_CB: Tensor | None,
        transform: LogitTransform = NO_TRANSFORM,
        softmax_coef_C: Tensor | None = None,
        entropy_coef_C: Tensor | None = None,
        factor_C: Tensor | None = None,
        first_class: int = 0,
        counted: CountedChunk = ALL,
    ) -> None:
        (self.C, self.D), (self.B, _) = (tensor.shape for tensor in first_term)
        self.terms = (first_term, second_term)
        self.exp_CB: Any = out_CB
        self.classes = slice(first_class, first_class + self.B)
        self.softcap = transform.softcap
        self.device, self.counted = reference_C.device, counted
        self.of_call = (
            reference_C, target_C, transform.bias_V, transform.scale,
            softmax_coef_C, entropy_coef_C, factor_C,
        )  # fmt: skip
        self.sizes = (counted.number, counted.first_place, self.C, self.B, self.D, first_class)

    def partials(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return memory for one partial result per half tile and row: [half tiles, C]."""
        return torch.empty(halves_of_tiles(self.B), self.C, dtype=dtype, device=self.device)

    def run(
        self,
        *,
        sums: Tensor | None = None,
        means: Tensor | None = None,
        grad_dot_logits: Tensor | None = None,
        maxima: Tensor | None = None,
        places: Tensor | None = None,
        marks: Tensor | None = None,
        guarded: bool = True,
        store: bool = True,
    ) -> None:
        """Fill the partial results that are given, and store E if `store` is set and E has memory.

        `places` are the classes of the maxima. With `marks`, only marked row tiles are computed.
        In later blocks of classes, sums and grad_dot_logits are added to those of earlier blocks.

        A row must be recomputed in two cases. Without `guarded`, an ignored row gets a sum of NaN
        if one of its logits is NaN or inf. Without `marks`, a row gets a wrong place if its largest
        logit is infinite.
        """
        programs = tiles.multiprocessors(self.device)
        results = (sums, means, grad_dot_logits, maxima, places)
        constants: dict[str, Any] = {
            "STORE": store and self.exp_CB is not None,
            "GUARDED": guarded,
            "ADD": self.classes.start > 0 and (sums is not None or grad_dot_logits is not None),
            "PROGRAMS": programs,
            "GROUP": tiles.GROUP,
        }
        if marks is None and self._pipelined:
            from lowtide.ops.linear_cross_entropy.engines.exponentials.gemm import gemm_gluon

            arguments = (*self.of_call, *results, *self.sizes)
            gemm_gluon.run(self.terms, self.exp_CB, arguments, constants)
            return
        kernels.exponentials_kernel[(programs,)](
            *self._operand_tiles,
            self._out_tiles if store else None,
            *self.of_call,
            marks,
            *results,
            *self.sizes,
            **constants,
            SOFTCAP=self.softcap,
            # Comparing an element's class with the target takes longer than an exponential. A
            # branch would let most half tiles skip this, but would take registers that a kernel
            # with these options lacks.
            MASKED=self.softcap > 0 and grad_dot_logits is not None,  # decision 0012
            RECOMPUTE=marks is not None,
            BLOCK_C=tiles.BLOCK_C,
            BLOCK_B=tiles.BLOCK_B,
            BLOCK_D=tiles.BLOCK_D,
            num_stages=tiles.STAGES,
            num_warps=tiles.WARPS,
        )

    @property
    def _pipelined(self) -> bool:
        pays = self.D <= PIPELINED_FEATURES and backend.is_large_gemm(self.C, self.B, self.D)
        return pays and self.softcap == 0 and backend.pipelines_on(self.device)

    @cached_property
    def _operand_tiles(self) -> tuple[Any, ...]:
        """Return tensor descriptors of each term's two operands: None, None for an absent term."""
        first, second = ((None, None) if term is None else tiles.described(term) for term in self.terms)
        return (*first, *second)

    @cached_property
    def _out_tiles(self) -> Any:
        """Return a tensor descriptor of E, or None if E has no memory."""
        if self.exp_CB is None:
            return None
        return tiles.describe(self.exp_CB, tiles.BLOCK_C, tiles.BLOCK_B // 2)
