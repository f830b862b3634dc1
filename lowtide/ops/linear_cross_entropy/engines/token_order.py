"""Gather the tokens of all ranks, if each has its own, and sum input gradients over the ranks.

A chunk then has as many tokens of each rank, rank after rank. Ranks with fewer tokens than others
take part with ignored tokens of zeros, which follow their own.

Shapes: n tokens of this rank, N of all ranks with those that fill up ranks that have fewer; D
features; C tokens of a chunk, of which c are of one rank.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lowtide.core.collectives import Group, Wait
from lowtide.core.matmul import Operand

if TYPE_CHECKING:
    from lowtide.ops.linear_cross_entropy.engines.gradients import InputRows
    from lowtide.ops.linear_cross_entropy.ranks.agreement import Agreement


class TokenOrder:
    """Hold the order in which the tokens of all ranks are taken."""

    def __init__(self, agreement: "Agreement", device: torch.device) -> None:
        self.group, self.n = agreement.group, agreement.tokens[agreement.group.rank]
        ranks, self.most = self.group.size, max(agreement.tokens)
        self.step = max(1, min(agreement.rows // ranks, self.most))  # tokens of a rank in a chunk
        self.N = ranks * self.most
        token_n = torch.arange(self.most, device=device)
        first_n = token_n // self.step * self.step  # the first of the rank's tokens in the chunk
        size_n = (self.most - first_n).clamp(max=self.step)
        rank_r1 = torch.arange(ranks, device=device)[:, None]
        self.place_rn = ranks * first_n + rank_r1 * size_n + token_n - first_n

    def gather(self, vector_n: Tensor, fill: float) -> Tensor:
        """Return the vector of all tokens, in their order; `fill` stands where a rank has none."""
        padded_n = vector_n.new_full((self.most,), fill)
        padded_n[: self.n] = vector_n
        gathered_rn = self.group.gather(padded_n)()
        return torch.empty_like(gathered_rn.view(-1)).index_copy_(
            0, self.place_rn.view(-1), gathered_rn.view(-1)
        )

    def own(self, vector_N: Tensor) -> Tensor:
        """Return the entries of this rank's tokens."""
        return vector_N[self.place_rn[self.group.rank, : self.n]]

    def own_rows(self, rows: slice) -> tuple[slice, int]:
        """Return this rank's tokens of a chunk, and how many tokens each rank has in it."""
        first, last = rows.start // self.group.size, rows.stop // self.group.size
        return slice(min(first, self.n), min(last, self.n)), last - first


def begin_rows(operand: Operand, rows: slice, order: TokenOrder | None, cleared_N: Tensor | None) -> Wait:
    """Begin to gather the chunk's rows of an operand; without an order every rank has them.

    Those of `cleared_N` become zeros: a NaN times a coefficient of 0 would reach dW.
    """
    if order is None:
        return lambda: operand.rows(rows)
    own, c = order.own_rows(rows)
    x_cD = operand.rows(own)
    if x_cD.shape[0] < c:
        x_cD = torch.cat([x_cD, x_cD.new_zeros(c - x_cD.shape[0], x_cD.shape[1])])
    wait = order.group.gather(x_cD)

    def tokens() -> Tensor:
        x_CD = wait().flatten(0, 1)
        return x_CD if cleared_N is None else x_CD.masked_fill_(cleared_N[rows, None], 0)

    return tokens


class SummedRows:
    """Sum an input gradient over the ranks, a chunk at a time, behind other work.

    Each rank gets all rows, or those of its own tokens.
    """

    def __init__(
        self, rows: "InputRows", group: Group, order: TokenOrder | None, sum_dtype: torch.dtype
    ) -> None:
        self.rows, self.group, self.order, self.sum_dtype = rows, group, order, sum_dtype
        self.waiting: tuple[slice, Wait] | None = None

    def memory(self, rows: slice) -> Tensor:  # [C, D]
        """Return where the chunk's rows are to be written."""
        self.finish()
        if self.order is None:
            return self.rows.memory(rows)
        dx = self.rows.dx.tensor
        C = rows.stop - rows.start
        return torch.empty(C, dx.shape[1], dtype=self.sum_dtype, device=dx.device)

    def begin_sum(self, dx_CD: Tensor, rows: slice) -> None:
        """Begin to sum what was written over the ranks."""
        if self.order is None:
            self.waiting = rows, self.group.sum_(dx_CD)
            return
        own, c = self.order.own_rows(rows)
        self.waiting = own, self.group.scatter_sum(dx_CD.view(-1, c, dx_CD.shape[1]))

    def finish(self) -> None:
        """Store the sum that was begun."""
        if self.waiting is None:
            return
        (rows, wait), self.waiting = self.waiting, None
        sum_CD = wait()
        if self.order is not None:
            self.rows.memory(rows).copy_(sum_CD[: rows.stop - rows.start])
        self.rows.store(rows)
