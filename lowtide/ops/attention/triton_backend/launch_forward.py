"""Launch the Triton kernel of forward.

Shapes: B batches; H query heads; M queries; E features of values.
"""

import torch
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, allocate, allocate_low
from lowtide.ops.attention.triton_backend import launch_few_queries, launch_small_problems
from lowtide.ops.attention.triton_backend.kernels.forward import forward_kernel
from lowtide.ops.attention.triton_backend.launch import kernel_call


def forward(operands: Operands, options: AttentionOptions, keep_statistics: bool) -> list[Tensor]:
    """Return the result and, if asked for, the statistics of each row and the result's low half."""
    call = kernel_call(operands, options)
    B, H, _, M, _, _, E = call.size
    out = allocate(call.query, (B, H, M, E), options.rows_first)
    statistics, low = None, allocate_low(out) if options.keep_low else None
    if keep_statistics:
        statistics = out.new_empty(operands.statistics_shape, dtype=torch.float32)
    if launch_small_problems.is_small(call):
        launch_small_problems.forward(call, out, low, statistics)
    elif launch_few_queries.is_few(call):
        launch_few_queries.forward(call, out, low, statistics)
    elif out.numel():
        tile = call.tile("forward")
        call = call.split(slice(None), slice(None), ("query",) if tile.blocks_K == 1 else ())
        tiles = cdiv(M, tile.M)
        forward_kernel[(tiles * B * H, tile.blocks_E)](
            *call.tensors, out, low, statistics, *call.strides, out.stride(), *call.sizes, tiles,
            *call.scalars, **call.constants, PIECES=call.pieces, **tile.constants, **tile.options,
        )  # fmt: skip
    return [each for each in (out, statistics, low) if each is not None]
