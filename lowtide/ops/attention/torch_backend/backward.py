"""Compute the gradients of attention in plain torch, tile by tile.

Every tile of scores is computed again. The only other tensor of a tile's size is the gradient of
these scores. In the notation of forward.py, with q and k the queries and keys, do and dlse the
upstream gradients of o and lse, rowsum the sum along each row, and tanh that of the soft cap,

    delta = rowsum(p D (do v^T)) - dlse    dv = (D p)^T do
    dz = p (D (do v^T) - delta)            dbias = dz, summed over the bias's broadcast axes
    ds = dz (1 - tanh^2) scale             dq = ds k            dk = ds^T q

The sum in delta equals rowsum(o do), which needs no scores but has the rounding of o. This rounding
is too large where nearly all of a row's weight lies on one key. There dz is a small difference of
two numbers, whose errors cancel only if both are computed from the same products. So the sum over
scores is taken for a tile of queries in two cases: all keys that these queries see are in one tile,
or one of their rows is confident. In all other cases rowsum(o do) is taken.

A gradient that is not asked for is not computed. The order of all sums is fixed. Shapes are named
as in forward.py; G is the number of key heads.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from lowtide.core.elementwise import quick_exp_
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, allocate
from lowtide.ops.attention.torch_backend.forward import Blockwise
from lowtide.ops.attention.torch_backend.tiling import Chunk, KeySpan

# A row is confident if one key has more than this share of the row's weight.
CONFIDENT = 1 / 8


class ScoreTile(NamedTuple):
    """Hold the parts of a tile's gradients that do not depend on delta."""

    weight_crn: Tensor
    """p, the softmax of the scores, before dropout."""
    slope_crn: Tensor | None
    """The slope of the soft cap, 1 - tanh^2; None without a soft cap."""
    keep_crn: Tensor | None
    """True for each score that dropout keeps; None without dropout."""
    grad_weight_crn: Tensor | None
    """D (do v^T), the gradient of p; None if only the value needs a gradient."""


class BlockwiseBackward(Blockwise):
    """Hold one backward call: its operands, the gradients asked for, and their memory."""

    def __init__(self, operands: Operands, options: AttentionOptions, needs_grad: Sequence[bool]) -> None:
        super().__init__(operands, options)
        self.grad_query_BHMK, self.grad_key_BGNK, self.grad_value_BGNE = (
            allocate(tensor, tensor.shape, options.rows_first) if want else None
            for tensor, want in zip(operands[:3], needs_grad)
        )
        self.grad_bias: Tensor | None = None
        if needs_grad[3] and operands.bias is not None:
            self.grad_bias = operands.bias.new_zeros(operands.bias.shape, dtype=self.dtype)
        self.needs_scores = any((needs_grad[0], needs_grad[1], self.grad_bias is not None))

    def backward(
        self,
        grad_output_BHME: Tensor,
        grad_logsumexp_BHM: Tensor | None,
        out_BHME: Tensor,
        statistics_BHSM: Tensor,
    ) -> list[Tensor]:
        """Return the gradients asked for among query, key, value and bias."""
        is_confident_BHM1 = _confident_rows(statistics_BHSM)
        for chunk in self.chunks():
            sums = [
                None if grad is None else grad.new_zeros(chunk.c, *grad.shape[2:], dtype=self.dtype)
                for grad in (self.grad_key_BGNK, self.grad_value_BGNE)
            ]
            for rows in self.rows():
                grad_output_crE = chunk.packed(grad_output_BHME, rows)
                delta_cr1 = None
                if not chunk.of_rows(is_confident_BHM1, rows).any():
                    delta_cr1 = _row_dot(grad_output_crE, chunk.packed(out_BHME, rows))
                grad_logsumexp_cr1 = None
                if grad_logsumexp_BHM is not None:
                    grad_logsumexp_cr1 = chunk.packed(grad_logsumexp_BHM[..., None], rows)
                statistics_crS = chunk.packed(statistics_BHSM.mT, rows)
                # A row that sees no key has z = -inf and a statistic -inf. With 0 in place of the
                # statistic its weights are 0, and not NaN.
                statistics_crS = statistics_crS.masked_fill(statistics_crS == -torch.inf, 0)
                self._rows_backward(
                    chunk, rows, grad_output_crE, grad_logsumexp_cr1, delta_cr1, statistics_crS, *sums
                )
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
        grad_logsumexp_cr1: Tensor | None,
        delta_cr1: Tensor | None,
        statistics_crS: Tensor,
        grad_key_cNK: Tensor | None,
        grad_value_cNE: Tensor | None,
    ) -> None:
        """Compute what some rows of a chunk add to the gradients.

        delta_cr1 is rowsum(o do), or None if it must be the sum over scores.
        """
        scale = self.options.scale
        query_crK = chunk.packed(self.operands.query, rows)
        grad_query_crK = None if self.grad_query_BHMK is None else torch.zeros_like(query_crK)
        spans = list(self.columns(rows))
        given = chunk, rows, query_crK, grad_output_crE, statistics_crS
        tile = None
        if self.needs_scores and (delta_cr1 is None or len(spans) == 1):
            delta_cr1 = query_crK.new_zeros(*query_crK.shape[:2], 1)
            for columns in spans:
                tile = self._score_tile(*given, columns)
                assert tile.grad_weight_crn is not None
                delta_cr1 += _row_dot(tile.weight_crn, tile.grad_weight_crn)
        if delta_cr1 is not None and grad_logsumexp_cr1 is not None:
            delta_cr1 = delta_cr1 - grad_logsumexp_cr1
        for columns in spans:
            if tile is None or len(spans) > 1:  # the tiles share one buffer
                tile = self._score_tile(*given, columns)
            weight_crn, slope_crn, keep_crn, grad_crn = tile
            if grad_value_cNE is not None:
                factor = 1.0 if keep_crn is None else self.rescale
                used_crn = weight_crn if keep_crn is None else weight_crn * keep_crn
                grad_value_cNE[:, columns.span].baddbmm_(used_crn.mT, grad_output_crE, alpha=factor)
            if grad_crn is None:
                continue
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

    def _score_tile(
        self,
        chunk: Chunk,
        rows: slice,
        query_crK: Tensor,
        grad_output_crE: Tensor,
        statistics_crS: Tensor,
        columns: KeySpan,
    ) -> ScoreTile:
        """Return the weights of a tile and their gradients, in buffers that tiles share."""
        z_crn, slope_crn = self.scores(chunk, rows, columns, query_crK)
        for part_cr1 in statistics_crS.split(1, 2):
            z_crn.sub_(part_cr1)
        weight_crn = quick_exp_(z_crn)
        keep_crn = None if self.operands.seed is None else self.keep_mask(chunk, rows, columns)
        if not self.needs_scores:
            return ScoreTile(weight_crn, slope_crn, keep_crn, None)
        value_cnE = chunk.keys(self.operands.value, columns.span)
        grad_weight_crn = self.product("gradients", grad_output_crE, value_cnE.mT)
        if keep_crn is not None:
            grad_weight_crn.mul_(keep_crn).mul_(self.rescale)
        return ScoreTile(weight_crn, slope_crn, keep_crn, grad_weight_crn)


def _confident_rows(statistics_BHSM: Tensor) -> Tensor:  # [B, H, M, 1] on the CPU
    """Return True for each confident row.

    The largest weight of a row is exp(-s), where s is the second statistic of the row. A row that
    sees no key counts as confident. While a CUDA graph is captured, the host cannot wait for the
    answer, so every row counts as confident.
    """
    if statistics_BHSM.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.ones_like(statistics_BHSM[:, :, 1, :, None], dtype=torch.bool, device="cpu")
    return (statistics_BHSM[:, :, 1, :, None] < -math.log(CONFIDENT)).cpu()


def _row_dot(a_crn: Tensor, b_crn: Tensor) -> Tensor:  # [c, r, 1]
    """Return rowsum(a b), the sum of the products along each row."""
    return (a_crn * b_crn).sum(-1, keepdim=True)
