"""Accumulate the weight gradient over chunks, in the exponentials and soft-targets engines.

The sum has one of these forms (decisions 0013, 0016): float32; packed into 24 or 20 bits, if four
bytes per weight would leave too few rows per chunk; or no sum, if one chunk has all tokens.

choose.py has their protocol, WeightAccumulator, and chooses one. in_torch.py has those that are not
Triton's.

A kernel on the Gluon pipeline takes all multiprocessors until it ends, so a collective beside it
would begin or end alone. While one runs, a first part of the classes leaves it some.

Shapes: N tokens, D features, P pairs of them, V classes; C tokens of a chunk; T targets: one of
each token, and class 0 up to a multiple of 8.
"""

import math
from typing import Any

import torch
from torch import Tensor

from lowtide.core.kernels import backend
from lowtide.core.matmul import product
from lowtide.ops.linear_cross_entropy.engines.gemm.counted_rows import ALL, CountedChunk
from lowtide.ops.linear_cross_entropy.engines.gemm.triton import multiprocessors
from lowtide.ops.linear_cross_entropy.engines.weight_gradient import in_torch, packed_triton, target_rows
from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded
from lowtide.ops.linear_cross_entropy.planning.division.cost_model import OWN, SECONDS

# What a sum over ranks takes beside a product (decision 0072): blocks of its kernel, and bytes a
# second that it moves, since two H200 sum 128 MiB in 0.54 ms.
SPARED, LINK_SPEED = 32, 2.5e11


class TritonFloatSum(in_torch.FloatSum):
    """Accumulate in a float32 tensor of its own, or in the gradient itself if that is float32."""

    def __init__(self, sum_VD: Tensor, factor: Tensor | None = None) -> None:
        super().__init__((slice(0, sum_VD.shape[0]), sum_VD), factor=factor)
        self.sum_VD = sum_VD

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: Any) -> None:
        target_rows.add_target_rows(self.sum_VD, None, x, coef_N, class_N, order_N, factor=self.factor)


class PackedSum:
    """Accumulate in the bfloat16 gradient's memory and one or half a byte per weight beyond it.

    packed_triton.py has the format.
    """

    factor, ends_early = None, True

    def __init__(self, gradient_VD: Tensor, applied: Tensor, *, bits: int, beside: int = 0) -> None:
        """`beside`: the bytes that are summed over ranks while each product is added."""
        self.pair_VP, self.beside = gradient_VD.view(torch.int32), beside
        self.low_VP = torch.empty_like(self.pair_VP, dtype={24: torch.uint16, 20: torch.uint8}[bits])
        self.applied = applied
        self.outer: tuple[Tensor | None, Tensor | None] = (None, None)
        self.operands: tuple[Tensor, Tensor] | None = None

    def add_product(
        self, exp_CV: Tensor, x_CD: Tensor, *, first: bool, last: bool, counted: CountedChunk = ALL
    ) -> None:
        if last and not first:
            # Deferred: once everything else is added, this GEMM's epilogue rounds.
            self.operands, self.counted = (exp_CV, x_CD), counted
        else:
            self._add(exp_CV, x_CD, add=not first, counted=counted)

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: Any) -> None:
        target_rows.add_target_rows(self.pair_VP, self.low_VP, x, coef_N, class_N, order_N)

    def subtract_outer(self, class_weight_V: Tensor | None, row_D: Tensor) -> None:
        # Subtracted in the rounding epilogue, to save a pass over the sum.
        self.outer = (class_weight_V, row_D)

    def finish(self) -> None:
        rounding, operands = (self.applied, *self.outer), self.operands
        self.operands = None
        if operands is None:
            packed_triton.round_(self.pair_VP, self.low_VP, *rounding)
        else:
            self._add(*operands, add=True, counted=self.counted, rounding=rounding)

    def _add(self, exp_CV: Tensor, x_CD: Tensor, **options: Any) -> None:
        sums = (self.pair_VP, self.low_VP)
        first = 0
        if self.beside and pipelined(*sums, exp_CV, x_CD):
            first = self._classes_beside(exp_CV.shape[1], *x_CD.shape)
        if not first:
            _add_product(*sums, exp_CV, x_CD, **options)
            return
        self._add_classes(slice(0, first), exp_CV, x_CD, spared=SPARED, **options)
        self._add_classes(slice(first, exp_CV.shape[1]), exp_CV, x_CD, **options)

    def _classes_beside(self, V: int, C: int, D: int) -> int:
        """Return the classes whose product takes as long as the collective beside it."""
        classes, features = OWN
        rounds = math.ceil(self.beside / LINK_SPEED / (C * SECONDS))
        tiles = rounds * max(0, multiprocessors(self.pair_VP.device) - SPARED)
        return min(V, math.ceil(tiles / math.ceil(D / features)) * classes)

    def _add_classes(
        self,
        classes: slice,
        exp_CV: Tensor,
        x_CD: Tensor,
        rounding: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
        **options: Any,
    ) -> None:
        applied, weight_V, row_D = rounding
        if classes.start < classes.stop:
            sums = self.pair_VP[classes], self.low_VP[classes]
            rounding = applied, None if weight_V is None else weight_V[classes], row_D
            add_in_pipeline(*sums, exp_CV[:, classes], x_CD, rounding=rounding, **options)


class RoundedProduct:
    """Form the gradient by a single GEMM over all tokens that rounds in its epilogue.

    To the rows of target classes more has to be added in float32. A GEMM of our own leaves these,
    at most one per token, packed into 24 bits; they are rounded after the addition (decision 0088).
    Where the GEMM is that of cuBLAS, which takes less time for few tokens, another GEMM forms these
    rows again in float32.
    """

    def __init__(self, gradient_VD: Tensor, applied: Tensor, *, ends_early: bool) -> None:
        """`ends_early`: the GEMM is our own."""
        self.gradient_VD, self.factor, self.ends_early = gradient_VD, applied, ends_early

    def add_product(
        self, exp_NV: Tensor, x_ND: Tensor, *, first: bool, last: bool, counted: CountedChunk = ALL
    ) -> None:
        assert first
        assert last
        self.operands, self.counted = (exp_NV, x_ND), counted
        if not self.ends_early:  # the other is deferred, until the targets are given
            product(self.gradient_VD, exp_NV.t(), x_ND)

    def add_target_rows(self, x: Tensor, coef_N: Tensor, class_N: Tensor, order_N: Any) -> None:
        (exp_NV, x_ND), (V, D), N = self.operands, self.gradient_VD.shape, class_N.shape[0]
        del self.operands
        rows = x, coef_N, class_N, order_N
        if self.ends_early:
            pair_VP = self.gradient_VD.view(torch.int32)
            low_VP = self.gradient_VD.view(torch.uint16)[:, : D // 2]  # not written
            low_NP = torch.empty(N, D // 2, dtype=torch.uint16, device=class_N.device)
            targets = target_rows.first_places(class_N, V), low_NP
            _add_product(pair_VP, low_VP, exp_NV, x_ND, add=False, counted=self.counted, targets=targets)
            target_rows.add_target_rows(pair_VP, low_NP, *rows, factor=self.factor, by_place=True)
            return
        exp_NT = target_rows.gather_targets(exp_NV, class_N, padded(N))
        sum_TD = torch.empty(exp_NT.shape[1], D, dtype=coef_N.dtype, device=class_N.device)
        product(sum_TD, exp_NT.t(), x_ND)
        target_rows.add_target_rows(self.gradient_VD, sum_TD, *rows, factor=self.factor, by_place=True)

    def subtract_outer(self, class_weight_V: Tensor | None, row_D: Tensor) -> None:
        raise AssertionError("with label smoothing there is a sum")

    def finish(self) -> None:
        """Do nothing, because every class has been rounded already."""


def _add_product(pair_VP: Tensor, low_VP: Tensor, exp_CV: Tensor, x_CD: Tensor, **options: Any) -> None:
    """Add a GEMM to a packed sum, on the Gluon pipeline if it fits, else in Triton."""
    add = add_in_pipeline if pipelined(pair_VP, low_VP, exp_CV, x_CD) else packed_triton.add_product
    add(pair_VP, low_VP, exp_CV, x_CD, **options)


# Sums on the Gluon pipeline.


def pipelined(pair_VP: Tensor, low_VP: Tensor, exp_CV: Tensor, x_CD: Tensor) -> bool:
    """Return True if the Gluon pipeline adds to such a sum.

    The GEMM must be large enough, and tensor maps must fit everything that it reads and writes.
    """
    half = exp_CV.dtype == x_CD.dtype == torch.bfloat16
    large = backend.is_large_gemm(exp_CV.numel(), x_CD.shape[1])
    return (
        half
        and large
        and backend.pipelines_on(x_CD.device)
        and backend.tma_compatible(exp_CV, x_CD, pair_VP, low_VP)
    )


def add_in_pipeline(*sums_and_operands: Any, **options: Any) -> None:
    """Add a GEMM to a packed sum on the Gluon pipeline."""
    from lowtide.ops.linear_cross_entropy.engines.weight_gradient import packed_gluon

    packed_gluon.add_product(*sums_and_operands, **options)
