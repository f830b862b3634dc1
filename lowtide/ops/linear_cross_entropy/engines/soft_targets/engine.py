"""Run the engine for class probabilities on a Hopper GPU; its softmax reads half the bytes.

Let z be a row's logits, y its class probabilities (smoothed, times class weights), and
p = exp(z - lse). The gradient G = c p - y, where c is the sum of y (without z-loss and upstream
gradient), must be formed in float32 before it is rounded. So z must be kept until lse is known.

Instead of z in 32 bits, the distance d = m - z is kept in 16 bits. m is the largest logit of the
row in one part of its classes, which is half a tile of the GEMM. d has steps of 1/1024 and goes
from 0 to 64. Half a step changes p by 5e-4 of itself, whatever z is. Rounding G to bfloat16 changes
G by up to 4e-3 of itself. p becomes 0 where it is below e^-64 of p at m. The engine takes only
bfloat16 y, because a y with more digits may be nearer to p than half a step.

The loss is summed in float32 in the GEMM's epilogue, where z is still exact. Each part yields m,
sum exp(-d), sum y and sum y d. From these, with M the largest m,

    lse = M + log sum_parts exp(m - M) sum exp(-d),   loss = sum_parts (sum y d + (lse - m) sum y)

G is written over d, which has the same width.

Shapes: V classes; C tokens of a chunk; T parts of a row.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowtide.core.elementwise import add_row_sum
from lowtide.core.kernels import backend
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import RowCoefs, TileColumns
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_
from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine
from lowtide.ops.linear_cross_entropy.engines.soft_targets import gemm_triton, softmax_triton
from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded


class SoftTargetsEngine(LossEngine):
    """Walk over one call's chunks with distances in place of logits."""

    def chunk_buffer(self, gradient: bool) -> Tensor:
        size = (self.plan.rows if gradient else 0), padded(self.V)
        return self.buffer(*size, dtype=self.plan.compute_dtype)[:, : self.V]

    def chunk_gradient_(
        self,
        buffer_CV: Tensor,
        chunks: list[Tensor],
        rows: slice,
        coefs: RowCoefs,
        stats: Any,
        take_stats: bool,
        gradient: bool,
        bias_sum_V: Tensor | None,
    ) -> Any:
        columns = self.columns(rows)
        operands = [(x_CD, operand.weight(slice(0, None))) for x_CD, operand in zip(chunks, self.operands)]
        g_CV = buffer_CV if gradient else None
        partials_CT4 = distances(operands, columns, g_CV)
        softmax_triton.gradient(partials_CT4, g_CV, coefs, stats, columns, take_stats=take_stats)
        add_row_sum(bias_sum_V, g_CV)
        return g_CV

    def tile_gradient_(
        self, logits_CB: Tensor, coefs: RowCoefs, stats: Any, columns: TileColumns, **defaults: Any
    ) -> Any:
        assert not defaults, "only the walk over classes takes tiles of logits"
        dtype = self.plan.compute_dtype
        return softmax_gradient_(logits_CB, coefs, stats, columns, take_stats=False, gradient_dtype=dtype)


def distances(terms: Sequence[tuple[Tensor, Tensor]], columns: TileColumns, out_CV: Tensor | None) -> Tensor:
    """Return the partial results of each part of a row, [C, T, 4].

    Write the distances to out_CV, if it is given. The kernel is Triton's or a Gluon pipeline.
    """
    if not fits_pipeline(columns.soft_CB, out_CV):
        return gemm_triton.distances(terms, columns, out_CV)
    from lowtide.ops.linear_cross_entropy.engines.soft_targets import gemm_gluon

    return gemm_gluon.distances(terms, columns, out_CV)


def fits_pipeline(soft_CV: Any, out_CV: Tensor | None) -> bool:
    """Return True if tensor maps can read the class probabilities and write 16-bit distances."""
    half = soft_CV.dtype == torch.bfloat16 and (out_CV is None or out_CV.dtype.itemsize == 2)
    return half and backend.pipelines_on(soft_CV.device) and backend.tma_compatible(soft_CV)
