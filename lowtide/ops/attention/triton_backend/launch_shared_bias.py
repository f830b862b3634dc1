"""Launch the kernel of the gradient of a bias that all batches share (shared_bias.py).

Shapes: B batches; H heads; M queries, N keys.
"""

import math

import torch

from lowtide.core.backend import cdiv
from lowtide.ops.attention.triton_backend.launch import KernelCall, strides_of
from lowtide.ops.attention.triton_backend.shared_bias import shared_bias_gradient_kernel

# Programs of a launch where the bias has fewer tiles: each of several runs sums some of the scores.
PROGRAMS = 528


def shared_bias_gradient(call: KernelCall) -> None:
    """Write the gradient of the bias."""
    grad_bias = call.grad_bias
    assert grad_bias is not None
    B, H, _, M, N, _, _ = call.size
    tile, own_heads = call.tile("shared bias"), grad_bias.shape[1]
    tiles, heads = (cdiv(M, tile.M), cdiv(N, tile.N)), H // own_heads
    steps = cdiv(B * heads, max(1, PROGRAMS // (math.prod(tiles) * own_heads)))
    runs, parts = cdiv(B * heads, steps), grad_bias
    if runs > 1:
        parts = grad_bias.new_empty(runs, *grad_bias.shape[1:], dtype=torch.float32)
    shared_bias_gradient_kernel[(math.prod(tiles) * own_heads * runs,)](
        *call.tensors, call.grad_output, call.row_terms, parts, *call.strides,
        strides_of(call.grad_output), strides_of(parts), B, *call.sizes, own_heads, heads, steps, *tiles,
        *call.scalars, **call.constants, **tile.constants_of_one_block, **tile.options,
    )  # fmt: skip
    if parts is not grad_bias:
        grad_bias.copy_(parts.sum(0, keepdim=True))
