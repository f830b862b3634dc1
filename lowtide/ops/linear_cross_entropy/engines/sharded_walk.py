"""Walk over chunks of tokens where the classes of a row are on several ranks.

A chunk's statistics are gathered while the logits of the next chunk are computed, and its input
gradient is summed over the ranks while the next chunk's products run. So two chunks of logits exist
at a time. In each chunk the input gradient is computed before the weight gradient, so that it can
be summed over the ranks meanwhile.

Shapes: C tokens of a chunk, D features, V classes of this rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lowtide.core.matmul import blocks, product_of_rows
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.token_order import SummedRows, begin_rows
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import choose_accumulator

ShardedEngine = Any  # an Engine that imports this module; `walk_tokens` needs its begin_stats

Begun = tuple[Any, Callable[[], Any] | None]


def walk_tokens(
    engine: ShardedEngine, coefs: Any, stats: Any, gradients: Gradients, take_stats: bool
) -> None:
    """Compute what `Engine.walk_tokens` does, where each rank has a part of the classes."""
    plan, summed = engine.plan, summed_rows(engine, gradients)
    sums = [choose_accumulator(plan, k, dw) for k, dw in enumerate(gradients.weights)]
    gradient = any(each is not None for each in (*summed, *sums, gradients.bias, gradients.scale))
    # This rank may form dW elsewhere, by blocks of classes, while other ranks form it here. If
    # statistics are gathered, this rank has to take part here. Otherwise it leaves if it forms no
    # gradient here: then no rank sums an input gradient, since all ranks would form it here.
    if not take_stats and not gradient:
        return
    bias_sum_V = None if gradients.bias is None else gradients.bias.tensor
    in_turn = [*chunks_of(engine)]
    buffers = [engine.chunk_buffer(gradient) for _ in in_turn[: 1 + take_stats]]

    def begin(place: int, rows: slice, tokens: list[Tensor]) -> Begun:
        z_CV = buffers[place % len(buffers)][: rows.stop - rows.start]
        engine.logits_into(z_CV, tokens)
        return z_CV, engine.begin_stats(z_CV, coefs[rows], stats[rows], rows) if take_stats else None

    for rows, chunks, z_CV, _ in merged_chunks(engine, in_turn, begin):
        if not gradient:
            continue
        row = coefs[rows], stats[rows], engine.columns(rows)
        g_CV = engine.tile_gradient_(z_CV, *row, bias_sum_B=bias_sum_V)
        for operand, dx in zip(engine.operands, summed):
            if dx is not None:
                dx_CD = dx.memory(rows)
                if engine.V == 0:
                    dx_CD.zero_()
                for classes, weight_BD in operand.weights(plan.operand_classes):
                    product_of_rows(dx_CD, g_CV[:, classes], weight_BD, add=classes.start > 0)
                dx.begin_sum(dx_CD, rows)
        for x_CD, sum in zip(chunks, sums):
            if sum is not None:
                sum.add_product(g_CV, x_CD, first=rows.start == 0, last=rows.stop == engine.M)
        del chunks, g_CV, z_CV
    for dx in summed:
        if dx is not None:
            dx.finish()
    for sum in sums:
        if sum is not None and engine.M:
            sum.finish()


def summed_rows(engine: ShardedEngine, gradients: Gradients) -> list[SummedRows | None]:
    """Return what sums each input gradient over the ranks; None for one that is not wanted."""
    group, order, sum_dtype = engine.plan.agreement.group, engine.order, engine.plan.sum_dtype
    of_rank = (engine.input_rows(dx) for dx in gradients.inputs)
    return [None if each is None else SummedRows(each, group, order, sum_dtype) for each in of_rank]


def chunks_of(engine: ShardedEngine) -> Iterator[slice]:
    """Yield the chunks of tokens that the ranks take at a time."""
    order = engine.order
    return blocks(engine.M, engine.plan.rows if order is None else order.step * order.group.size)


def tokens_ahead(engine: ShardedEngine, in_turn: list[slice]) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield each chunk and its tokens, while the tokens of the next chunk are gathered."""
    order = engine.order

    def begin(rows: slice) -> list[Callable[[], Tensor]]:
        return [begin_rows(operand, rows, order, engine.cleared_N) for operand in engine.operands]

    ahead = begin(in_turn[0]) if in_turn else []
    for place, rows in enumerate(in_turn):
        tokens = [wait() for wait in ahead]
        ahead = begin(in_turn[place + 1]) if place + 1 < len(in_turn) else []
        yield rows, tokens
        del tokens  # free them before the next chunk's arrive


def merged_chunks(
    engine: ShardedEngine, in_turn: list[slice], begin: Callable[[int, slice, list[Tensor]], Begun]
) -> Iterator[tuple[slice, list[Tensor], Any, Any]]:
    """Yield each chunk with its tokens, its logits, and the result of merging its statistics.

    `begin` takes the chunk's number, its rows and its tokens. It returns two things: the chunk's
    logits, or what an engine computes instead; and a function that waits for the statistics of all
    ranks and merges them, or None if no statistics are taken. `begin` is called for the next chunk
    before a chunk is merged.
    """
    before: tuple[slice, list[Tensor], Any, Callable[[], Any]] | None = None
    for place, (rows, tokens) in enumerate(tokens_ahead(engine, in_turn)):
        found, merge = begin(place, rows, tokens)
        if merge is None:
            yield rows, tokens, found, None
            continue
        if before is not None:
            yield *before[:3], before[3]()
        before = rows, tokens, found, merge
        del tokens, found
    if before is not None:
        yield *before[:3], before[3]()
