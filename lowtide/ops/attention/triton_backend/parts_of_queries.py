"""Divide the queries of a kernel of dk and dv into parts, where there are few tiles of keys.

One program sums a tile of dk or dv over all queries. With 77 keys and eight heads there are sixteen
programs, which leave most of a card idle. So programs that share a tile take a part of the queries
each, and their float32 sums are added in the end (decision 0107).

Shapes: B batches; H query heads; M queries, N keys; K features of queries and keys, E of values. dk
and dv are the gradients of key and value; dz is that of the softmax's input z.
"""

import torch
from torch import Tensor

from lowtide.ops.attention.triton_backend.launch import KernelCall
from lowtide.ops.attention.triton_backend.strips import Strip

# Fewer programs leave a part of the card idle. A part has at least so many tiles of queries.
PROGRAMS, FEWEST_TILES = 192, 4


def part_count(programs: int, tiles: int) -> int:
    """Return the number of parts, from the programs of one part and the tiles of all queries."""
    return max(1, min(PROGRAMS // programs, tiles // FEWEST_TILES))


def with_parts(call: KernelCall, strip: Strip, parts: int) -> KernelCall:
    """Return the call with memory for dk and dv of the strip, and sums of dz, of several parts."""
    if parts == 1:
        return call
    B, K, E = strip.batches, call.size.K, call.size.E

    def memory(like: Tensor | None, *shape: int) -> Tensor | None:
        return None if like is None else like.new_empty(parts, B, *shape, dtype=torch.float32)

    return call._replace(
        grad_key=memory(call.grad_key, strip.groups, strip.keys, K),
        grad_value=memory(call.grad_value, strip.groups, strip.keys, E),
        bias_sum=memory(call.bias_sum, call.size.H, 1, call.size.N),
    )


def sum_parts(call: KernelCall, own: KernelCall, strip: Strip) -> None:
    """Write the sums of the parts that `own` holds to the gradients of the call."""
    heads, keys = strip.heads(call.size), slice(strip.first_key, strip.end_key)
    for whole, parts in ((call.grad_key, own.grad_key), (call.grad_value, own.grad_value)):
        if whole is not None and parts is not None:
            whole[:, strip.key_heads, keys] = parts.sum(0)
    if call.bias_sum is not None and own.bias_sum is not None:
        call.bias_sum[:, heads, :, keys] = own.bias_sum[:, :, heads, :, keys].sum(0)
