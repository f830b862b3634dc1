"""Walk over chunks of tokens where the classes of a row are on several ranks.

A chunk's statistics are gathered while the logits of the next chunk are computed, and its input
gradient is summed while the next chunk's products run. So two chunks of logits exist at a time. In
each chunk the input gradient goes first: the weight gradient's product hides its sum.

Shapes: C tokens of a chunk, D features, V classes of this rank.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from lowtide.core.matmul import blocks, product_of_rows
from lowtide.ops.linear_cross_entropy.engines.gradients import Gradients
from lowtide.ops.linear_cross_entropy.engines.token_order import SummedRows, begin_rows
from lowtide.ops.linear_cross_entropy.engines.weight_gradient.choose import choose_accumulator

ShardedEngine = Any  # an Engine that imports this module, and has begin_stats


def walk_tokens(
    engine: ShardedEngine, coefs: Any, stats: Any, gradients: Gradients, take_stats: bool
) -> None:
    """Compute what `Engine.walk_tokens` does, from this rank's classes and the other ranks'."""
    plan, agreement, order = engine.plan, engine.plan.agreement, engine.order
    assert agreement is not None
    summed = [
        None if each is None else SummedRows(each, agreement.group, order, plan.sum_dtype)
        for each in (engine.input_rows(dx) for dx in gradients.inputs)
    ]
    sums = [choose_accumulator(plan, k, dw) for k, dw in enumerate(gradients.weights)]
    gradient = any(each is not None for each in (*summed, *sums, gradients.bias, gradients.scale))
    # On some ranks dW may be formed by blocks of classes. Their statistics are gathered all the same;
    # and without statistics a rank that has no gradient to form here has none to sum, nor have others.
    if not take_stats and not gradient:
        return
    for rows, chunks, z_CV in _logits(engine, coefs, stats, gradient, take_stats):
        if not gradient:
            continue
        g_CV = engine.tile_gradient_(z_CV, coefs[rows], stats[rows], engine.columns(rows))
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
        if gradients.bias is not None:
            gradients.bias.tensor.add_(g_CV.sum(0, dtype=plan.sum_dtype))
        del chunks, g_CV, z_CV
    for dx in summed:
        if dx is not None:
            dx.finish()
    for sum in sums:
        if sum is not None and engine.M:
            sum.finish()


def _logits(
    engine: ShardedEngine, coefs: Any, stats: Any, gradient: bool, take_stats: bool
) -> Iterator[tuple[slice, list[Tensor], Any]]:
    """Yield each chunk with its tokens and products, when its statistics are merged."""
    order = engine.order
    step = engine.plan.rows if order is None else order.step * order.group.size
    chunks = [*blocks(engine.M, step)]
    buffers = [engine.chunk_buffer(gradient) for _ in chunks[: 1 + take_stats]]

    def begin(rows: slice) -> list[Callable[[], Tensor]]:
        return [begin_rows(operand, rows, order, engine.cleared_N) for operand in engine.operands]

    ahead = begin(chunks[0]) if chunks else []
    before: tuple[Any, Callable[[], None]] | None = None
    for place, rows in enumerate(chunks):
        tokens = [wait() for wait in ahead]
        ahead = begin(chunks[place + 1]) if place + 1 < len(chunks) else []
        z_CV = buffers[place % len(buffers)][: rows.stop - rows.start]
        engine.logits_into(z_CV, tokens)
        if not take_stats:
            yield rows, tokens, z_CV
            continue
        merge = engine.begin_stats(z_CV, coefs[rows], stats[rows], rows)
        if before is not None:
            before[1]()
            yield before[0]
        before = (rows, tokens, z_CV), merge
        del tokens, z_CV
    if before is not None:
        before[1]()
        yield before[0]
