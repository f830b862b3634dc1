"""Choose and launch the kernel that computes a chunk's logits and stores them as exponentials.

Shapes: C tokens of a chunk, D features, R of a second, narrow term; B classes of a block, or all.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lowtide.core.kernels import backend
from lowtide.core.kernels.backend import cdiv
from lowtide.ops.linear_cross_entropy.engines.exponentials import gemm_triton as kernels
from lowtide.ops.linear_cross_entropy.engines.gemm import triton as tiles
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.row_math import LogitTransform

Term = tuple[Tensor, Tensor]
# The Gluon pipeline runs GEMMs with few features, where the epilogue takes a large part of the
# time. A GEMM must have so many multiplications that the pipeline's longer launch does not matter
# (decision 0039).
PIPELINED_FEATURES, FEWEST = 1024, 1 << 37
NO_TRANSFORM = LogitTransform()


def halves_of_tiles(classes: int) -> int:
    """Return the number of half tiles in a row of `classes` classes."""
    return 2 * cdiv(classes, tiles.BLOCK_B)


class Exponentials:
    """Hold the operands of one chunk and one block of classes, and run the kernel once or more."""

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
        """Fill the given partial results, and store E if it has memory and is to be stored.

        With `marks`, only marked row tiles are computed. Sums and grad_dot_logits are added to
        those of earlier blocks of classes. Without `guarded`, an ignored row whose logits are not
        finite gets NaN as its sum and has to be recomputed, and a row with an infinite logit gets a
        wrong place of its maximum.
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
            from lowtide.ops.linear_cross_entropy.engines.exponentials import gemm_gluon

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
            # With a branch, most half tiles would skip the comparison with the target, which takes
            # longer than an exponential. But the branch takes registers, which a kernel with these
            # options lacks.
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
        large = self.C * self.B * self.D >= FEWEST and self.D <= PIPELINED_FEATURES
        return large and self.softcap == 0 and backend.pipelines_on(self.device)

    @cached_property
    def _operand_tiles(self) -> tuple[Any, ...]:
        """Return descriptors of both operands of each term; None for an absent term's."""
        first, second = ((None, None) if term is None else tiles.described(term) for term in self.terms)
        return (*first, *second)

    @cached_property
    def _out_tiles(self) -> Any:
        """Return a descriptor of E, or None where it is not stored."""
        if self.exp_CB is None:
            return None
        return tiles.describe(self.exp_CB, tiles.BLOCK_C, tiles.BLOCK_B // 2)
