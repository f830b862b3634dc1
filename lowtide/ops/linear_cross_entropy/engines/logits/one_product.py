"""Compute the loss of few tokens and its gradients, with dW by a single GEMM over all tokens.

The gradient G of all logits is kept in half precision. dW is written last. Until then its memory
holds float32 numbers: the logits of one chunk of rows after the other, then the sums of dX. So the
call holds little more than its results and G, and no more than eager torch holds.

The factor that all rows share is not applied to G, because every target's entry would be rounded
with the same error. For dX, the factor is applied to the float32 sums. For dW, there are no such
sums, because the GEMM rounds its result as it writes it. So the GEMM applies the factor 1/N of a
mean, which the host knows, and X is multiplied by the rest of the factor. The rest is 1 for a mean
in which no row is ignored, without class weights, normalizer and logit scale.

The host takes as long for such a call as the device. So this module makes few launches and
allocations: four kernels and three GEMMs, if dW's memory holds all logits and dX is one GEMM, of at
most PRODUCT_ROWS rows.

Shapes: N tokens, D features, V classes; C tokens of a chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowtide.core.kernels.backend import next_power_of_2
from lowtide.core.kernels.launch import remember_launches
from lowtide.core.matmul import blocks, product, product_of_rows, rows_of
from lowtide.core.pending_gradient import PendingGradient
from lowtide.ops.linear_cross_entropy.engines.formulas.row_math import SoftmaxStats, TileColumns
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients, as_sums
from lowtide.ops.linear_cross_entropy.engines.logits.softmax_triton import softmax_gradient_into
from lowtide.ops.linear_cross_entropy.engines.loss_engine import LossEngine
from lowtide.ops.linear_cross_entropy.planning.byte_counts import padded_classes
from lowtide.ops.linear_cross_entropy.planning.operands import follows_columns

WIDTH, WARPS = 4096, 4


@remember_launches
@triton.jit
def _apply_factor_kernel(
    x_ND_ptr, ignored_N_ptr, factor_ptr, scaled_ND_ptr, sum_ND_ptr, dx_ND_ptr, x_stride, D, share,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write scaled = factor * share * x and dx = factor * sum. Grid: one program per row.

    Ignored rows of X become 0, since they may be NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(factor_ptr)
    read = tl.where(tl.load(ignored_N_ptr + row), 0, D)
    for start in range(0, D, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside, own = columns < D, row * D + columns
        x_d = tl.load(x_ND_ptr + row * x_stride + columns, mask=columns < read, other=0.0).to(tl.float32)
        tl.store(
            scaled_ND_ptr + own, (x_d * (factor * share)).to(scaled_ND_ptr.dtype.element_ty), mask=inside
        )
        if sum_ND_ptr is not None:
            sum_d = tl.load(sum_ND_ptr + own, mask=inside, other=0.0) * factor
            tl.store(dx_ND_ptr + own, sum_d.to(dx_ND_ptr.dtype.element_ty), mask=inside)


class OneProductEngine(LossEngine):
    """Compute what LossEngine does, for a mean or sum whose dW is a single GEMM."""

    def forward(self, factor: Tensor) -> tuple[SoftmaxStats, Gradients]:
        plan, head, (operand,), device = self.plan, self.head, self.operands, self.device
        weight_VD, dtype, kind = operand.weight_VD, plan.compute_dtype, device.type
        N, (V, D), x_ND = self.M, weight_VD.shape, operand.rows(slice(0, self.M))
        scaled = factor if head.scale is None else factor * head.scale.to(plan.sum_dtype)

        coefs, stats = self.rows.coefs(), self.rows.empty_stats(SoftmaxStats)
        columns = TileColumns(0, self.transform, self.class_weight_V)
        by_columns = follows_columns(head.weights[0], plan.options)
        dw_VD = torch.empty((D, V) if by_columns else (V, D), dtype=dtype, device=device)
        dw_VD = dw_VD.t() if by_columns else dw_VD
        memory, width = as_sums(dw_VD, plan.sum_dtype), padded_classes(V, kind)
        g_NV = torch.empty((N, width), dtype=dtype, device=device)
        g_NV = g_NV if width == V else g_NV[:, :V]
        for chunk in blocks(N, plan.rows):
            z_CV = memory.as_strided((chunk.stop - chunk.start, V), (width, 1))
            product(z_CV, rows_of(x_ND, chunk), weight_VD.t())
            softmax_gradient_into(
                rows_of(g_NV, chunk), z_CV, coefs[chunk], stats[chunk], columns, take_stats=True
            )
        sum_ND = dx_ND = None
        if plan.needs_grad.inputs[0]:
            sum_ND = memory.as_strided((N, D), (D, 1))
            dx_ND = torch.empty((N, D), dtype=dtype, device=device)
            product_of_rows(sum_ND, g_NV, weight_VD)
        scaled_ND = torch.empty((N, D), dtype=dtype, device=device)
        share = float(max(N, 1)) if plan.options.reduction == "mean" else 1.0
        if N:
            _apply_factor_kernel[(N,)](
                x_ND, coefs.ignored_N, scaled, scaled_ND, sum_ND, dx_ND, x_ND.stride(0), D, share,
                BLOCK=min(WIDTH, next_power_of_2(D)), num_warps=WARPS,
            )  # fmt: skip
        product(dw_VD, g_NV.t(), scaled_ND, scale=1 / share)
        dx = None if dx_ND is None else PendingGradient(dx_ND, scaled)
        db = None
        if plan.needs_grad.bias:
            db = PendingGradient(g_NV.sum(0, dtype=plan.sum_dtype), remaining=scaled)
        return stats, Gradients((dx,), (PendingGradient(dw_VD, scaled),), db)
