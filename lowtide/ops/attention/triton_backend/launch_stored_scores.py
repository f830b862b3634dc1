"""Launch the Triton kernels that store the gradients of a strip's scores, or read them.

strips.py says what a strip is, and what backward stores for each of its scores.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries
and keys, E of values. dq, dk and dv are the gradients of query, key and value.
"""

import math
from dataclasses import dataclass

from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.triton_backend.kernels.stored_scores import (
    bias_of_scores_kernel,
    key_value_of_scores_kernel,
    query_of_scores_kernel,
    scores_kernel,
)
from lowtide.ops.attention.triton_backend.launch import KernelCall, Strides, broadcast_strides, strides_of
from lowtide.ops.attention.triton_backend.parts_of_queries import part_count, sum_parts, with_parts
from lowtide.ops.attention.triton_backend.strips import Stored, Strip


@dataclass(frozen=True, slots=True)
class StripMemory:
    """Hold the memory of each number in strips.Stored; None for numbers that are not stored."""

    weight: Tensor | None = None
    grad_scores: Tensor | None = None
    grad_z: Tensor | None = None

    @property
    def strides(self) -> Strides:
        """Return the strides, which are the same for all these tensors."""
        tensors = (self.weight, self.grad_scores, self.grad_z)
        return next((each.stride() for each in tensors if each is not None), (0, 0, 0))


def memory_of(call: KernelCall, strip: Strip, stores: Stored, room: Tensor) -> StripMemory:
    """Return a strip's memory as views of `room`, which every strip reuses."""
    shape = strip.shape(call.size)
    tensors = (part[: math.prod(shape)].view(shape) for part in room)
    return StripMemory(*(next(tensors) if each else None for each in stores))


def store(call: KernelCall, strip: Strip, memory: StripMemory) -> None:
    """Store what `memory` has room for, and write the strip's part of bias_sum."""
    _, _, G, M, N, _, _ = call.size
    B, R = strip.batches, call.size.R
    tile, heads = call.tile("scores"), strip.batches * strip.groups * R
    tiles_m, tiles_n = cdiv(M, tile.M), cdiv(strip.keys, tile.N)
    parts = None
    if call.bias_sum is not None:
        parts = call.bias_sum.new_zeros(heads, tiles_m, tiles_n * tile.N)
    scores_kernel[(heads * tiles_m * tiles_n,)](
        *call.tensors, call.grad_output, call.row_terms, memory.weight, memory.grad_scores, memory.grad_z,
        parts, *call.strides, strides_of(call.grad_output), memory.strides, B, *call.sizes,
        strip.first_group, strip.first_key, tiles_m, tiles_n, *call.scalars, **call.constants,
        PIECES=call.pieces, **tile.constants, **tile.options,
    )  # fmt: skip
    if call.bias_sum is not None and parts is not None:
        keys = slice(strip.first_key, strip.end_key)
        sums = parts.sum(1)[:, : strip.keys].view(strip.groups, B, R, strip.keys)
        call.bias_sum.view(B, G, R, N)[:, strip.key_heads, :, keys] = sums.transpose(0, 1)


def query_gradient(
    call: KernelCall, strip: Strip, memory: StripMemory, grad_query: Tensor, add: bool
) -> None:
    """Write dq from the stored gradients of scores; with `add`, add to the previous values."""
    _, R, M, N, K, _ = call.sizes
    tile = call.tile("query of scores")
    tiles = cdiv(M, tile.M)
    query_of_scores_kernel[(tiles * strip.batches * strip.groups * R * tile.blocks_K,)](
        call.key, call.first, call.end, memory.grad_scores, grad_query, strides_of(call.key),
        memory.strides, grad_query.stride(), strip.batches, R, M, N, K, strip.first_group,
        strip.groups, strip.first_key, strip.end_key, tiles, call.scalars.scale,
        PRECISION=call.constants["PRECISION"], PIECES=call.pieces, ADD=add, BLOCK_M=tile.M, BLOCK_N=tile.N,
        BLOCK_K=tile.K, BLOCKS_K=tile.blocks_K, CUT_K=tile.cut_K, **tile.options,
    )  # fmt: skip


def key_value_gradients(
    call: KernelCall, strip: Strip, memory: StripMemory, grad_value: Tensor | None
) -> None:
    """Write dk from the stored gradients and dv from the stored weights, where they have memory."""
    _, R, M, N, K, E = call.sizes
    tile = call.tile("key and value of scores")
    blocks = tile.blocks_K * (call.grad_key is not None) + tile.blocks_E * (grad_value is not None)
    if not blocks:
        return
    programs = cdiv(strip.keys, tile.N) * strip.batches * strip.groups * blocks
    parts = part_count(programs, cdiv(M, tile.M))
    # No kernel but that of the scores themselves writes bias_sum.
    sums = call._replace(grad_value=grad_value, bias_sum=None)
    own = with_parts(sums, strip, parts)
    key_value_of_scores_kernel[(programs, 1, parts)](
        call.query, call.grad_output, call.first, call.end, call.row_first, call.row_end,
        memory.grad_scores, memory.weight, own.grad_key, own.grad_value, strides_of(call.query),
        strides_of(call.grad_output), memory.strides, strides_of(own.grad_key),
        strides_of(own.grad_value), strip.batches, R, M, N, K, E, strip.first_group, strip.groups,
        strip.first_key, call.scalars.scale, PRECISION=call.constants["PRECISION"], PIECES=call.pieces,
        IN_PARTS=parts > 1, **tile.constants, **tile.options,
    )  # fmt: skip
    if parts > 1:
        sum_parts(sums, own, strip)


def bias_gradient(call: KernelCall, strip: Strip, memory: StripMemory, grad_bias: Tensor, add: bool) -> None:
    """Write the bias's gradient from the stored ones; with `add`, add to the previous values."""
    _, R, M, N, _, _ = call.sizes
    tile = call.tile("bias of scores")
    all_of = strip.batches, strip.groups * R
    own = tuple(1 if shared == 1 else count for shared, count in zip(grad_bias.shape, all_of))
    loops = all_of[0] // own[0], all_of[1] // own[1]
    tiles = cdiv(M, tile.M), cdiv(strip.keys, tile.N)
    scores = memory.grad_scores if memory.grad_z is None else memory.grad_z
    bias_of_scores_kernel[(math.prod(tiles + own),)](
        call.first, call.end, scores, grad_bias, memory.strides, broadcast_strides(grad_bias),
        strip.batches, R, M, N, own, loops, strip.first_group, strip.first_key, tiles, ADD_BIAS=add,
        BLOCK_M=tile.M, BLOCK_N=tile.N, **tile.options,
    )  # fmt: skip
