"""Launch the Triton kernels of backward.

A call takes one of four ways. A problem is one head of one batch.

* Many small problems (one tile of scores each) have their own kernels (launch_small_problems.py).
* Many short problems in float32: one program computes a whole problem, and each score once.
* Stored gradients: each score is computed once, and its gradient is stored for the other kernels,
  strip by strip; with many features its weight too (strips.py, launch_stored_scores.py).
* Recomputed scores: the kernel of dq and those of dk and dv compute each score anew.

Except in small problems, a bias with more than one row and column needs stored gradients, unless
one of two kernels writes its gradient. In half precision the kernel of dq does so for a bias that
neither batches nor heads share. For some shared biases of short problems, a separate kernel
recomputes the scores; in half precision it also transposes the bias for the kernel of dk and dv.

Shapes: B batches; H query heads, G key heads, R = H / G; M queries, N keys; K features of queries
and keys, E of values. dq, dk and dv are the gradients of query, key and value; dz is the gradient
of the softmax's input z.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lowtide.core.kernels.backend import cdiv
from lowtide.ops.attention.definition.intervals import rows_of_keys
from lowtide.ops.attention.definition.operands import AttentionOptions, Operands, allocate, is_far
from lowtide.ops.attention.triton_backend import (
    launch_recomputed,
    launch_small_problems,
    launch_stored_scores,
)
from lowtide.ops.attention.triton_backend.launch import KernelCall, kernel_call, step_of
from lowtide.ops.attention.triton_backend.launch_stored_scores import StripMemory
from lowtide.ops.attention.triton_backend.strips import Stored, Strip, scores_to_store, strips

# LONGEST: the most queries and the most keys of a short problem. PROBLEMS: the fewest problems for
# which one program computes a whole short problem (decision 0061).
LONGEST, PROBLEMS = 1024, 528
# With at most so many scores in half precision, short_bias_gradient also takes a bias that heads
# share and batches do not. Strips of so few scores leave a part of the card idle (decision 0065).
FEW_SCORES = 1 << 24
# Up to so many queries and keys, float32 stores the weights wherever dk and dv do not fit into one
# kernel: that kernel of dv would have too few programs (decision 0101).
MOST_POSITIONS = 512
# Strips of fewer programs leave a part of the card idle, so scores are recomputed instead. With two
# pieces 128 programs take 0.7 of the time of recomputed scores (decision 0104).
FEWEST_PROGRAMS, FEWEST_PROGRAMS_OF_2_PIECES = 192, 128


def backward(
    operands: Operands,
    options: AttentionOptions,
    needs_grad: Sequence[bool],
    grad_output: Tensor,
    grad_logsumexp: Tensor | None,
    out: Tensor,
    statistics: Tensor,
    low: Tensor | None,
    rows: Sequence[Tensor | None] = (None, None),
) -> list[Tensor]:
    """Return the gradients of query, key, value and bias that needs_grad asks for.

    `rows` are the rows of keys (intervals.py) if the caller has them.
    """
    operands, out, statistics = _readable(operands, out, statistics)
    low = low.contiguous() if low is not None and is_far(low) else low
    call = kernel_call(operands, options)
    B, H, _, M, N, _, _ = call.size
    gradients = [
        allocate(each, each.shape, options.rows_first) if want else None
        for each, want in zip(operands[:3], needs_grad)
    ]
    bias = operands.bias if needs_grad[3] else None
    if 0 in (B, H, M, N):
        zeros = [gradient.zero_() for gradient in gradients if gradient is not None]
        return zeros if bias is None else [*zeros, torch.zeros_like(bias)]
    grad_output = grad_output.contiguous() if is_far(grad_output) else grad_output
    grad_query, grad_key, grad_value = gradients
    call = call._replace(
        grad_output=grad_output, grad_logsumexp=grad_logsumexp, grad_query=grad_query,
        grad_key=grad_key, grad_value=grad_value, row_first=rows[0], row_end=rows[1],
        step=step_of((*operands[:3], grad_output), call.size.K, call.size.E) if call.pieces == 1 else 1,
    )  # fmt: skip
    if launch_small_problems.is_small(call, "problem gradient", bias is not None):
        grad_bias = launch_small_problems.backward(call, bias)
    else:
        call = call._replace(row_terms=launch_recomputed.row_terms(call, out, low, statistics))
        grad_bias = _of_several_tiles(call, operands, options, needs_grad, bias, statistics)
    return [each for each in (*gradients, grad_bias) if each is not None]


def _of_several_tiles(
    call: KernelCall,
    operands: Operands,
    options: AttentionOptions,
    needs_grad: Sequence[bool],
    bias: Tensor | None,
    statistics: Tensor,
) -> Tensor | None:
    """Write the gradients that have memory, where the scores of a problem are several tiles.

    Return the bias's gradient if `bias` is given.
    """
    B, H, G, _, N, _, _ = call.size
    stores_weights = _stores_weights(call)
    together = call.find_tile("key and value") is not None
    own_bias = together and _is_own_bias(call, bias)
    grad_bias = bias_of_scores = bias_sum = None
    if bias is not None:
        if bias.shape[3] == 1:  # first, since sums of dz over all keys are rounding errors alone
            grad_bias = _bias_of_queries(bias, call.grad_logsumexp, statistics)
        elif bias.shape[2] == 1:  # the kernel of dk, dv or the stored scores sums dz over queries
            bias_sum = statistics.new_empty(B, H, 1, N)
        else:
            # The kernel of dq skips keys that no query of its tile sees: there the gradient is 0.
            skips = own_bias and operands.first is not None
            grad_bias = bias_of_scores = (bias.new_zeros if skips else bias.new_empty)(bias.shape)
    call = call._replace(grad_bias=bias_of_scores, bias_sum=bias_sum)
    if call.first is not None and call.end is not None and call.row_first is None:
        row_first, row_end = rows_of_keys(call.first, call.end, N)
        call = call._replace(row_first=row_first, row_end=row_end)
    whole, every = _is_whole(call), Strip(0, B, 0, G, 0, N)
    if whole:
        launch_recomputed.confident_delta("whole problem", call._replace(pieces=1), every)
    if own_bias:
        needs_grad = *needs_grad[:3], False
    elif _sums_short_bias(call, whole):
        transposed_bias = launch_small_problems.short_bias_gradient(call)
        call = call._replace(grad_bias=None, transposed_bias=transposed_bias)
        needs_grad = *needs_grad[:3], False
    stores = scores_to_store(operands, options, needs_grad, together, stores_weights)
    if whole:
        launch_recomputed.whole_problems(call)
    elif stores_weights or (any(stores) and not _leaves_idle(call, stores)):
        _in_strips(call, stores)
    else:
        if call.grad_query is not None or own_bias:
            launch_recomputed.confident_delta("query", call._replace(pieces=1), every)
            launch_recomputed.query_gradient(call)
        _key_value_gradients(call)
    if bias is None or bias_sum is None:
        return grad_bias
    return bias_sum.sum_to_size(bias.shape).to(bias.dtype)


def _readable(operands: Operands, out: Tensor, statistics: Tensor) -> tuple[Operands, Tensor, Tensor]:
    """Return saved tensors, copied where hooks changed their strides to unreadable ones."""
    matrices = (each.contiguous() if is_far(each) else each for each in (*operands[:3], out))
    query, key, value, out = matrices
    first, end = (None if each is None else each.contiguous() for each in (operands.first, operands.end))
    operands = operands._replace(query=query, key=key, value=value, first=first, end=end)
    return operands, out, statistics.contiguous()


def _is_whole(call: KernelCall) -> bool:
    """Return True if one program computes dq, dk and dv of a whole problem.

    Such calls have many short problems in float32 with few features, and TF32 is not allowed.
    """
    B, H, G, M, N, _, _ = call.size
    takes = call.pieces == 3 and G == H and call.grad_query is not None and call.bias_sum is None
    takes = takes and (call.grad_bias is None or _shares_bias(call))
    few = takes and call.find_tile("whole problem") is not None
    return few and B * H >= PROBLEMS and max(M, N) <= LONGEST


def _stores_weights(call: KernelCall) -> bool:
    """Return True if backward stores the weights beside the gradients of the scores (strips.py)."""
    if call.find_tile("query") is None:  # no kernel recomputes scores of so many features
        return True
    apart = call.pieces > 1 and call.find_tile("key and value") is None
    return apart and max(call.size.M, call.size.N) <= MOST_POSITIONS


def _is_own_bias(call: KernelCall, bias: Tensor | None) -> bool:
    """Return True if the kernel of dq writes the bias's gradient, since nothing shares the bias."""
    B, H, _, M, N, _, _ = call.size
    return bias is not None and call.pieces == 1 and bias.shape == (B, H, M, N) and min(M, N) > 1


def _sums_short_bias(call: KernelCall, whole: bool) -> bool:
    """Return True if short_bias_gradient computes the bias's gradient from recomputed scores."""
    size, bias = call.size, call.grad_bias
    if bias is None or max(size.M, size.N) > LONGEST:
        return False
    if not whole and (call.pieces > 1 or call.find_tile("short bias") is None):
        return False
    return _shares_bias(call) or size.B * size.H * size.M * size.N <= FEW_SCORES


def _shares_bias(call: KernelCall) -> bool:
    """Return True if several batches of short problems share a bias that needs a gradient."""
    size, bias = call.size, call.grad_bias
    return bias is not None and bias.shape[0] == 1 and size.B > 1 and max(size.M, size.N) <= LONGEST


def _in_strips(call: KernelCall, stores: Stored) -> None:
    """Write all gradients, strip by strip, and reuse one buffer for what the strips store."""
    size, bias, pieces = call.size, call.grad_bias, call.pieces if call.pieces > 1 else 0
    shared = (False, False) if bias is None else (bias.shape[0] == 1, bias.shape[1] == 1)
    found = strips(size, sum(stores) * call.dtype.itemsize, pieces, *shared)
    room = call.query.new_empty(sum(stores), math.prod(found[0].shape(size)))
    own, every = (found[0].batches, found[0].groups), (size.B, size.G)
    add_bias = any(each and mine < all_of for each, mine, all_of in zip(shared, own, every))
    total_bias = _sum_of(bias) if add_bias else bias
    summed = call._replace(grad_bias=total_bias)
    for _, of_heads in itertools.groupby(found, key=lambda strip: (strip.first_batch, strip.first_group)):
        _strips_of_heads(summed, list(of_heads), stores, room, add_bias)
    _round_sum(total_bias, bias)


def _strips_of_heads(
    call: KernelCall, of_heads: Sequence[Strip], stores: Stored, room: Tensor, add_bias: bool
) -> None:
    """Write the gradients of some batches and heads; of_heads holds all their strips of keys."""
    first, add = of_heads[0], len(of_heads) > 1
    call = call.of_batches(slice(first.first_batch, first.first_batch + first.batches))
    grad_query = None if call.grad_query is None else call.grad_query[:, first.heads(call.size)]
    total = _sum_of(grad_query) if add else grad_query
    stores_weights, together = _stores_weights(call), call.find_tile("key and value") is not None
    # A kernel of both dk and dv splits the value itself. The others read it in pieces: that of dv
    # has no registers left to split it, and that of scores loads it for each tile of queries.
    call = call.split(first.heads(call.size), first.key_heads, ("value",) if together else ())
    kernel = "scores" if stores_weights else "key and value" if together else "value"
    launch_recomputed.confident_delta(kernel, call, first)
    for strip in of_heads:
        memory = launch_stored_scores.memory_of(call, strip, stores, room)
        if stores_weights:
            launch_stored_scores.store(call, strip, memory)
        has_key = not stores_weights and launch_recomputed.key_value_gradient(call, strip, memory)
        if total is not None:
            launch_stored_scores.query_gradient(call, strip, memory, total, add)
        if not has_key:
            grad_value = call.grad_value if stores_weights else None
            launch_stored_scores.key_value_gradients(call, strip, memory, grad_value)
        if call.grad_bias is not None:
            launch_stored_scores.bias_gradient(call, strip, memory, call.grad_bias, add_bias)
    _round_sum(total, grad_query)


def _leaves_idle(call: KernelCall, stores: Stored) -> bool:
    """Return True if a strip has too few programs for the card, but the whole call has enough."""
    B, _, G, _, N, _, _ = call.size
    tile = call.find_tile("key and value")
    if tile is None or call.pieces == 1 or call.grad_bias is not None:
        return False
    strip = strips(call.size, sum(stores) * call.dtype.itemsize, call.pieces)[0]
    programs = strip.batches * strip.groups * cdiv(strip.keys, tile.N)
    fewest = FEWEST_PROGRAMS_OF_2_PIECES if call.pieces == 2 else FEWEST_PROGRAMS
    return programs < fewest <= B * G * cdiv(N, tile.N)


def _key_value_gradients(call: KernelCall) -> None:
    """Write dk and dv from recomputed scores.

    Operands that are split into pieces are taken some key heads at a time, which bounds the memory
    of the pieces.
    """
    size, together = call.size, call.find_tile("key and value")
    groups, loaded_once = size.G, ("key", "value") if together else ()
    if call.pieces > 1:
        tile = together or call.tile("value")
        groups = min(size.G, cdiv(2 * FEWEST_PROGRAMS, size.B * cdiv(size.N, tile.N)))
    for first in range(0, size.G, groups):
        strip = Strip(0, size.B, first, min(groups, size.G - first), 0, size.N)
        own = call.split(strip.heads(size), strip.key_heads, loaded_once)
        launch_recomputed.confident_delta("key and value" if together else "value", own, strip)
        launch_recomputed.key_value_gradient(own, strip, StripMemory())
        del own  # free these pieces before the next ones are made


def _bias_of_queries(bias: Tensor, grad_logsumexp: Tensor | None, statistics: Tensor) -> Tensor:
    """Return the gradient of a bias that is the same for all keys.

    Such a bias changes the logsumexp of its row and nothing else. So its gradient is the upstream
    gradient of the logsumexp.
    """
    if grad_logsumexp is None:
        return torch.zeros_like(bias)
    moved = grad_logsumexp.masked_fill(statistics[:, :, -1] == -torch.inf, 0)
    return moved[..., None].sum_to_size(bias.shape).to(bias.dtype)


def _sum_of(gradient: Tensor | None) -> Tensor | None:
    """Return float32 zeros that a gradient is summed in: its own memory if that is float32."""
    if gradient is None or gradient.dtype == torch.float32:
        return gradient if gradient is None else gradient.zero_()
    return torch.zeros_like(gradient, dtype=torch.float32)


def _round_sum(total: Tensor | None, gradient: Tensor | None) -> None:
    """Copy a gradient's sum to the gradient's memory, unless both are the same memory."""
    if gradient is not None and total is not None and total is not gradient:
        gradient.copy_(total)
