"""Compute the gradients of attention in plain torch, tile by tile.

Every tile of scores is computed once more. The only other tensor of its size is the gradient of
these scores. In the notation of forward.py, with do and dlse the upstream gradients,

    delta = rowsum(o do) - dlse            dv = (D p)^T do
    dz = p (D (do v^T) - delta)            dbias = dz, summed over the bias's broadcast axes
    ds = dz (1 - tanh^2) scale             dq = ds k            dk = ds^T q

A gradient that is not asked for is not computed. The order of all sums is fixed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.ops.attention.definition.operands import Operands, Options, allocate
from lowtide.ops.attention.torch_backend.forward import Blockwise
from lowtide.ops.attention.torch_backend.tiling import Chunk


class BlockwiseBackward(Blockwise):
    """Hold one backward call: its operands, the gradients asked for, and their memory."""

    def __init__(self, operands: Operands, options: Options, needs_grad: Sequence[bool]) -> None:
        super().__init__(operands, options)
        self.grad_query_BHMK, self.grad_key_BGNK, self.grad_value_BGNE = (
            allocate(tensor, tensor.shape, options.rows_first) if want else None
            for tensor, want in zip(operands[:3], needs_grad)
        )
        self.grad_bias: Tensor | None = None
        if needs_grad[3] and operands.bias is not None:
            self.grad_bias = operands.bias.new_zeros(operands.bias.shape, dtype=self.dtype)

    def backward(
        self,
        grad_output_BHME: Tensor,
        grad_logsumexp_BHM: Tensor | None,
        out_BHME: Tensor,
        statistics_BHSM: Tensor,
    ) -> list[Tensor]:
        """Return the gradients asked for among query, key, value and bias."""
        for chunk in self.chunks():
            sums = [
                None if grad is None else grad.new_zeros(chunk.c, *grad.shape[2:], dtype=self.dtype)
                for grad in (self.grad_key_BGNK, self.grad_value_BGNE)
            ]
            for rows in self.rows():
                grad_output_crE = chunk.packed(grad_output_BHME, rows)
                delta_cr1 = (grad_output_crE * chunk.packed(out_BHME, rows)).sum(-1, keepdim=True)
                if grad_logsumexp_BHM is not None:
                    delta_cr1 -= chunk.packed(grad_logsumexp_BHM[..., None], rows)
                statistics_crS = chunk.packed(statistics_BHSM.mT, rows)
                # Where a row sees no column, z is -inf, and exp(-inf - 0) is 0.
                statistics_crS = statistics_crS.masked_fill(statistics_crS == -torch.inf, 0)
                self._rows_backward(chunk, rows, grad_output_crE, delta_cr1, statistics_crS, *sums)
            for grad, total in zip((self.grad_key_BGNK, self.grad_value_BGNE), sums):
                if grad is not None and total is not None:
                    part = grad[chunk.batches, chunk.groups]
                    part.copy_(total.view(part.shape))
        bias = self.operands.bias
        grad_bias = None if self.grad_bias is None or bias is None else self.grad_bias.to(bias.dtype)
        gradients = (self.grad_query_BHMK, self.grad_key_BGNK, self.grad_value_BGNE, grad_bias)
        return [gradient for gradient in gradients if gradient is not None]

    def _rows_backward(
        self,
        chunk: Chunk,
        rows: slice,
        grad_output_crE: Tensor,
        delta_cr1: Tensor,
        statistics_crS: Tensor,
        grad_key_cNK: Tensor | None,
        grad_value_cNE: Tensor | None,
    ) -> None:
        """Add the gradients that some rows of a chunk contribute."""
        scale = self.options.scale
        query_crK = chunk.packed(self.operands.query, rows)
        grad_query_crK = None if self.grad_query_BHMK is None else torch.zeros_like(query_crK)
        for columns in self.columns(rows):
            z_crn, slope_crn = self.scores(chunk, rows, columns, query_crK)
            for part_cr1 in statistics_crS.split(1, 2):
                z_crn.sub_(part_cr1)
            weight_crn = z_crn.exp_()
            keep_crn = None if self.operands.seed is None else self.keep_mask(chunk, rows, columns)
            if grad_value_cNE is not None:
                factor = 1.0 if keep_crn is None else self.rescale
                used_crn = weight_crn if keep_crn is None else weight_crn * keep_crn
                grad_value_cNE[:, columns.span].baddbmm_(used_crn.mT, grad_output_crE, alpha=factor)
            if grad_query_crK is None and grad_key_cNK is None and self.grad_bias is None:
                continue
            value_cnE = chunk.keys(self.operands.value, columns.span)
            grad_crn = self.product("gradients", grad_output_crE, value_cnE.mT)
            if keep_crn is not None:
                grad_crn.mul_(keep_crn).mul_(self.rescale)
            grad_crn.sub_(delta_cr1).mul_(weight_crn)
            if self.grad_bias is not None:  # summed over the bias's broadcast axes
                part = chunk.of_bias(self.grad_bias, rows, columns.span)
                part.add_(chunk.unpacked(grad_crn, rows).sum_to_size(part.shape))
            if slope_crn is not None:
                grad_crn.mul_(slope_crn)
            if grad_query_crK is not None:
                grad_query_crK.baddbmm_(grad_crn, chunk.keys(self.operands.key, columns.span), alpha=scale)
            if grad_key_cNK is not None:
                grad_key_cNK[:, columns.span].baddbmm_(grad_crn.mT, query_crK, alpha=scale)
        if self.grad_query_BHMK is not None and grad_query_crK is not None:
            chunk.of_rows(self.grad_query_BHMK, rows).copy_(chunk.unpacked(grad_query_crK, rows))
