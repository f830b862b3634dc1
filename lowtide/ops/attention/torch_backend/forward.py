"""Compute attention in plain torch, for any device: tiles of BLAS products and an online softmax.

Let z be the scores (scaled, capped, biased, masked), D dropout's factor of a score (0, or
1 / (1 - rate)), v the values and o the result, for query i and key j:

    lse_i = log sum_j exp(z_ij)        p_ij = exp(z_ij - lse_i)        o_i = sum_j D_ij p_ij v_j

Query heads that share a key head are rows of one product (tiling.py). backward.py goes through the
same tiles again.

Shapes: B batches, H query heads, M queries, N keys, K features of queries and keys, E of values.
A tile has c key heads, r rows and n columns (tiling.py). A row has S = 2 statistics (operands.py).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from lowtide.core.elementwise import quick_exp_, slope_of_tanh
from lowtide.core.kernels.devices import runs_plain_torch
from lowtide.core.matmul import blocks
from lowtide.ops.attention.definition import dropout
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, allocate, sizes
from lowtide.ops.attention.torch_backend.tiling import Chunk, KeySpan, head_chunks, tile_shape

# The integers of the size of a score, and the bits of its mantissa.
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}
MANTISSA = {torch.float32: (1 << 23) - 1, torch.float64: (1 << 52) - 1}


class Blockwise:
    """Hold one call: its operands, its tiles, and the buffers that the tiles share."""

    def __init__(self, operands: Operands, options: AttentionOptions) -> None:
        self.operands, self.options = operands, options
        self.size = sizes(operands)
        self.dtype, self.device = operands.sum_dtype, operands.device
        self.shape = tile_shape(self.size)
        # For each tile of queries, by its first query: where the keys of its first and its last
        # query begin, and where the keys of these two end.
        self.limits: dict[int, tuple[int, int, int, int]] = {}
        if operands.first is not None and operands.end is not None:
            firsts, ends = operands.first.tolist(), operands.end.tolist()
            for rows in self.rows():  # Both vectors are non-decreasing: their ends are their extremes.
                first, last = rows.start, rows.stop - 1
                self.limits[first] = firsts[first], firsts[last], ends[first], ends[last]
        self.buffers: dict[str, Tensor] = {}
        if operands.seed is not None:
            row_key_BHM = dropout.row_keys(operands.seed, self.size.B, self.size.H, self.size.M)
            self.row_key_BHM1 = row_key_BHM[..., None]
            self.column_key_N = dropout.column_keys(operands.seed, self.size.N)
            self.rescale = dropout.rescale(options.dropout)

    def chunks(self) -> Iterator[Chunk]:
        return head_chunks(self.size, self.shape.heads, self.dtype)

    def rows(self) -> Iterator[slice]:
        return blocks(self.size.M, self.shape.rows)

    def columns(self, rows: slice) -> Iterator[KeySpan]:
        """Yield the tiles' keys, from the first to the last key that one of these rows sees."""
        low, whole_low, whole_high, high = self.limits.get(rows.start, (0, 0, self.size.N, self.size.N))
        for span in blocks(max(high - low, 0), self.shape.columns):
            span = slice(low + span.start, low + span.stop)
            yield KeySpan(span, begins=span.start < whole_low, ends=whole_high < span.stop)

    def product(self, name: str, a_crk: Tensor, b_ckn: Tensor, factor: float = 1.0) -> Tensor:
        """Return factor * a @ b in the buffer of that name, which tiles share."""
        shape = (a_crk.shape[0], a_crk.shape[1], b_ckn.shape[2])
        size = shape[0] * shape[1] * shape[2]
        if name not in self.buffers or self.buffers[name].numel() < size:
            self.buffers[name] = torch.empty(size, dtype=self.dtype, device=self.device)
        buffer_crn = self.buffers[name][:size].view(shape)
        if not runs_plain_torch(self.device.type):
            return torch.baddbmm(buffer_crn, a_crk, b_ckn, beta=0, alpha=factor, out=buffer_crn)
        # On mps torch's baddbmm adds 0 times the buffer's old content, which may be NaN.
        torch.bmm(a_crk, b_ckn, out=buffer_crn)
        return buffer_crn if factor == 1 else buffer_crn.mul_(factor)

    def forward(self, keep_statistics: bool) -> list[Tensor]:
        """Return the result and, if asked for, the statistics of each row."""
        B, H, _, M, _, _, E = self.size
        query = self.operands.query
        out_BHME = allocate(query, (B, H, M, E), self.options.rows_first)
        statistics_BHSM = query.new_empty(
            self.operands.statistics_shape if keep_statistics else 0, dtype=self.dtype
        )
        for chunk in self.chunks():
            for rows in self.rows():
                out_crE, max_cr1, sum_cr1 = self._attend(chunk, rows)
                nothing_cr1 = sum_cr1 == 0  # a row that sees no key: its result is 0
                sum_cr1.masked_fill_(nothing_cr1, 1)
                chunk.of_rows(out_BHME, rows).copy_(chunk.unpacked(out_crE.div_(sum_cr1), rows))
                if keep_statistics:
                    log_sum_cr1 = sum_cr1.log_().masked_fill_(nothing_cr1, -torch.inf)
                    statistics_crS = torch.cat((max_cr1, log_sum_cr1), 2)
                    chunk.of_rows(statistics_BHSM.mT, rows).copy_(chunk.unpacked(statistics_crS, rows))
        return [out_BHME, statistics_BHSM] if keep_statistics else [out_BHME]

    def _attend(self, chunk: Chunk, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return sum(D w v), max(z) and sum(w) of some rows, where w = exp(z - max(z))."""
        query_crK = chunk.packed(self.operands.query, rows)
        c, r, _ = query_crK.shape
        out_crE = query_crK.new_zeros(c, r, self.size.E)
        # The first maximum is finite: for a row that has seen no key yet, z - max is -inf, not NaN.
        max_cr1 = query_crK.new_full((c, r, 1), torch.finfo(self.dtype).min)
        sum_cr1 = query_crK.new_zeros(c, r, 1)
        for columns in self.columns(rows):
            weight_crn, _ = self.scores(chunk, rows, columns, query_crK)
            new_max_cr1 = torch.maximum(max_cr1, weight_crn.amax(-1, keepdim=True))
            quick_exp_(weight_crn.sub_(new_max_cr1))
            fade_cr1 = quick_exp_(max_cr1.sub_(new_max_cr1))
            max_cr1 = new_max_cr1
            sum_cr1.mul_(fade_cr1).add_(weight_crn.sum(-1, keepdim=True))
            if self.operands.seed is not None:
                weight_crn.mul_(self.keep_mask(chunk, rows, columns))
            out_crE.mul_(fade_cr1).baddbmm_(weight_crn, chunk.keys(self.operands.value, columns.span))
        if self.operands.seed is not None:
            out_crE.mul_(self.rescale)
        return out_crE, max_cr1, sum_cr1

    def scores(
        self, chunk: Chunk, rows: slice, columns: KeySpan, query_crK: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Return z, and the slope of the soft cap if there is one."""
        key_cnK = chunk.keys(self.operands.key, columns.span)
        z_crn = self.product("scores", query_crK, key_cnK.mT, self.options.scale)
        slope_crn = None
        if softcap := self.options.softcap:
            slope_crn = slope_of_tanh(z_crn.div_(softcap))
            z_crn.tanh_().mul_(softcap)
        z = chunk.unpacked(z_crn, rows)
        if (bias := self.operands.bias) is not None:
            part = chunk.of_bias(bias, rows, columns.span)
            if bias.dtype == torch.bool:
                # As bytes; torch converts these eight times as fast.
                _hide_(z, part.view(torch.uint8).to(INTEGERS[z.dtype]).sub_(1))
            else:
                z.add_(part)
        self._hide_beyond_limits_(z, rows, columns)
        return z_crn, slope_crn

    def _hide_beyond_limits_(self, z: Tensor, rows: slice, columns: KeySpan) -> None:
        """Set scores of keys that the mask hides to -inf."""
        if not (columns.begins or columns.ends):
            return
        integer, span = INTEGERS[z.dtype], columns.span
        key_n = torch.arange(span.start, span.stop, dtype=integer, device=self.device)
        if columns.begins and self.operands.first is not None:
            first_m1 = self.operands.first[rows, None].to(integer)
            _hide_(z, _sign(key_n - first_m1))
        if columns.ends and self.operands.end is not None:
            end_m1 = self.operands.end[rows, None].to(integer)
            _hide_(z, _sign(end_m1 - 1 - key_n))

    def keep_mask(self, chunk: Chunk, rows: slice, columns: KeySpan) -> Tensor:  # [c, r, n]
        """Return True for each score that dropout keeps."""
        row_key_cr1 = chunk.packed(self.row_key_BHM1, rows)
        return dropout.keep_mask(row_key_cr1, self.column_key_N[columns.span], self.options.dropout)


def _sign(x: Tensor) -> Tensor:
    """Return -1 where an integer is below 0, and 0 elsewhere."""
    return x.bitwise_right_shift_(8 * x.itemsize - 1)


def _hide_(z: Tensor, hidden: Tensor) -> None:
    """Set scores to -inf where `hidden`, which it overwrites, is -1; it is 0 elsewhere.

    On a CPU masked_fill_ takes several times as long as these operations on bits. Both hide nan,
    too, and arithmetic would not (decision 0082).
    """
    bits = z.view(hidden.dtype)
    bits.bitwise_or_(hidden)  # all ones where hidden; -inf has zeros in the mantissa
    bits.bitwise_and_(hidden.bitwise_and_(MANTISSA[z.dtype]).bitwise_not_())
