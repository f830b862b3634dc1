"""Launch the kernels for many small problems, and for the gradient of a bias of short problems.

A problem is one head of one batch. The kernels are in kernels/small_problems.py and
kernels/short_bias.py. A program takes a run: several problems, one after the other.

Shapes: B batches; H heads; M queries, N keys; K features of queries and keys, E of values.
"""

import math

import torch
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.triton_backend.kernels.short_bias import short_bias_gradient_kernel
from lowtide.ops.attention.triton_backend.kernels.small_problems import (
    problem_forward_kernel,
    problem_gradient_kernel,
)
from lowtide.ops.attention.triton_backend.launch import VECTOR, KernelCall, strides_of
from lowtide.ops.attention.triton_backend.tile_sizes import FEWEST_PROBLEMS, Tile, sums_bias_of_small

# The programs that run at once on an H200: two per multiprocessor, in backward and for a bias.
AT_ONCE = 264
# The most programs of forward and of backward, unless there are more heads.
FORWARD_PROGRAMS, BACKWARD_PROGRAMS = 1056, AT_ONCE
# A shared bias with fewer tiles than this may have several programs per tile, at most so many in
# all. Each of them sums over a part of the problems that share the bias.
BIAS_PROGRAMS = 6 * AT_ONCE


def is_small(call: KernelCall, kernel: str = "problem forward", grad_bias: bool = False) -> bool:
    """Return True if the kernel takes this call: many problems of one tile each.

    Query heads must not share key heads. If TF32 is allowed, other kernels take float32. grad_bias:
    the bias needs a gradient.
    """
    B, H, G, _, _, _, _ = call.size
    bias = call.bias
    if _tile(call, kernel) is None or G != H or B * H < FEWEST_PROBLEMS or call.pieces == 2:
        return False
    return bias is None or not grad_bias or sums_bias_of_small(bias.shape, H)


def _tile(call: KernelCall, kernel: str) -> Tile | None:
    """Return a tile that holds all scores of a problem, or None if a problem is too large."""
    for name in (kernel, f"wide {kernel}"):
        tile = call.find_tile(name)
        if tile is not None and call.size.M <= tile.M and call.size.N <= tile.N:
            return tile
    return None


def forward(call: KernelCall, out: Tensor, low: Tensor | None, statistics: Tensor | None) -> None:
    """Write the result and, where memory is given, its low half and the statistics of each row."""
    H, _, *sizes = call.sizes
    runs, batches = _runs(call, FORWARD_PROGRAMS)
    tile = call.tile("problem forward")
    problem_forward_kernel[(runs * H,)](
        *call.tensors, out, low, statistics, *call.strides, out.stride(), call.size.B, H, *sizes, batches,
        *call.scalars, **call.constants, SHARED=_is_shared(call), **tile.constants_of_one_block,
        **tile.options,
    )  # fmt: skip


def backward(call: KernelCall, bias: Tensor | None) -> Tensor | None:
    """Write the gradients that have memory; return the bias's gradient if `bias` is given."""
    H, _, *sizes = call.sizes
    runs, batches = _runs(call, BACKWARD_PROGRAMS)
    tile, grad_bias = _tile(call, "problem gradient"), bias
    assert tile is not None
    if bias is not None and bias.shape[0] == 1:
        grad_bias = bias.new_empty(runs, H, *sizes[:2], dtype=torch.float32)
    elif bias is not None:
        grad_bias = bias.new_empty(bias.shape)
    gradients = call.grad_query, call.grad_key, call.grad_value, grad_bias
    problem_gradient_kernel[(runs * H,)](
        *call.tensors, call.grad_output, call.grad_logsumexp, *gradients, *call.strides,
        strides_of(call.grad_output), call.lse_strides,
        *(strides_of(each) for each in gradients), call.size.B, H, *sizes, batches, *call.scalars,
        **call.constants, SHARED=_is_shared(call), **tile.constants_of_one_block, **tile.options,
    )  # fmt: skip
    if bias is None or grad_bias is None or bias.shape[0] > 1:
        return grad_bias
    return grad_bias.sum_to_size(bias.shape).to(bias.dtype)


def short_bias_gradient(call: KernelCall) -> Tensor | None:
    """Write the gradient of the bias of short problems, from recomputed scores.

    In half precision, return KernelCall.transposed_bias for the kernel of dk and dv, unless it
    would be larger than the gradient of the key (of the value, if the key needs none).
    """
    grad_bias, bias = call.grad_bias, call.bias
    assert grad_bias is not None
    assert bias is not None
    B, H, _, M, N, _, _ = call.size
    transposed_bias, gradient = None, call.grad_value if call.grad_key is None else call.grad_key
    transposed_shape = (*bias.shape[:2], N, cdiv(M, VECTOR) * VECTOR)
    transposed_bytes = math.prod(transposed_shape) * bias.itemsize
    if call.pieces == 1 and gradient is not None and transposed_bytes <= gradient.nbytes:
        transposed_bias = bias.new_empty(transposed_shape)
    tile, (own_batches, own_heads, *_) = call.tile("short bias"), grad_bias.shape
    tiles, batches, heads = (cdiv(M, tile.M), cdiv(N, tile.N)), B // own_batches, H // own_heads
    programs = math.prod(tiles) * own_batches * own_heads
    runs, steps = _bias_runs(programs, batches * heads)
    parts = grad_bias
    if runs > 1:  # parts hold at most BIAS_PROGRAMS tiles of float32, 25 MiB
        parts = grad_bias.new_empty(runs * own_batches, own_heads, M, N, dtype=torch.float32)
    short_bias_gradient_kernel[(programs * runs,)](
        *call.tensors, call.grad_output, call.row_terms, parts, transposed_bias, *call.strides,
        strides_of(call.grad_output), strides_of(parts), strides_of(transposed_bias), batches, *call.sizes,
        own_batches, own_heads, heads, steps, *tiles, *call.scalars, **call.constants, CUT=call.is_cut(tile),
        **tile.constants_of_one_block, **tile.options,
    )  # fmt: skip
    if parts is not grad_bias:
        grad_bias.copy_(parts.view(runs, own_batches, own_heads, M, N).sum(0))
    return transposed_bias


def _bias_runs(programs: int, problems: int) -> tuple[int, int]:
    """Return the number of runs for one tile of a bias, and the number of problems of each run.

    All programs of a wave end at about the same time. So the time is the number of waves times the
    problems of a run, where a program's beginning and end count as two more (decision 0097).
    """

    def time(runs: int) -> int:
        return cdiv(programs * runs, AT_ONCE) * (cdiv(problems, runs) + 2)

    runs = min(range(1, max(1, min(problems, BIAS_PROGRAMS // programs)) + 1), key=time)
    steps = cdiv(problems, runs)
    return cdiv(problems, steps), steps


def _runs(call: KernelCall, programs: int) -> tuple[int, int]:
    """Return the number of runs for one head, and the number of batches of each run."""
    B, H = call.size.B, call.size.H
    batches = cdiv(B, max(1, programs // H))
    return cdiv(B, batches), batches


def _is_shared(call: KernelCall) -> bool:
    """Return True if all batches share the bias, or if there is no bias."""
    return call.bias is None or call.bias.shape[0] == 1
