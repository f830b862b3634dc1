"""Count the bytes that each part of a call takes, with a function for each engine.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from lowtide.core import backend
from lowtide.core.backend import PRODUCT_ROWS
from lowtide.core.matmul import copied_bytes
from lowtide.core.strides import multiplies
from lowtide.ops.linear_cross_entropy.planning.byte_counts import (
    ROW_TILE,
    TARGETS,
    ByteCounts,
    ClassBlocks,
)
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.operands import Operands, padded_classes
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import ENOUGH_ROWS

# Most bytes of the exponentials of a chunk; with more, a step of shape A took 1 % longer, of D 1 to
# 3 %.
MOST_BYTES = 2 << 30  # decision 0044

STATISTICS = 24  # numbers per token of a chunk: row statistics and their temporaries


def memory_of(call: Call, operands: Operands) -> ByteCounts:
    """Return the bytes that each part of the call takes on the engine named in its options."""
    return MODELS[call.options.engine](call, operands)


def _logits_torch(call: Call, operands: Operands) -> ByteCounts:
    """Count float32 logits, and the temporaries of a softmax in torch."""
    options, call_kind, logit = call.options, call.call_kind, call.sum_size
    # Tensors as large as the logits that the softmax holds beside them.
    several = (bool(options.softcap), call_kind.log_probs, call_kind.probabilities, call.needs_grad.scale)
    copies = 2 * sum(several) * call.sum_size
    # Only the Triton kernel rounds in place: it does so before it stores a number.
    if operands.dtype != options.sum_dtype:
        logit += operands.dtype.itemsize
    return _on_float32_sums(
        call,
        operands,
        logits=padded_classes(call.V, call.device)
        * ((logit if call.needs_grad.some else call.sum_size) + copies),
        block_logit=logit + copies,
    )


def _logits_triton(call: Call, operands: Operands) -> ByteCounts:
    """Count float32 logits, which become their gradient in place."""
    return _on_float32_sums(
        call, operands, logits=padded_classes(call.V, call.device) * call.sum_size, block_logit=call.sum_size
    )


def _soft_targets(call: Call, operands: Operands) -> ByteCounts:
    """Count 16-bit distances, and four float32 partial sums for every 128 classes.

    The interpreter's tiles are smaller.
    """
    logits = call.V // 8 + 2048
    if call.needs_grad.some:
        logits += (call.V + 8) * operands.dtype.itemsize
    counts = _on_float32_sums(call, operands, logits=logits, block_logit=call.sum_size)
    return _with_packed_sum(counts, call)


def _cpu_exponentials(call: Call, operands: Operands) -> ByteCounts:
    """Count bfloat16 exponentials; and per token its products and its target's weight row."""
    size, features = operands.dtype.itemsize, sum(call.features)
    logits = call.V * size if call.needs_grad.some else 0
    counts = _on_float32_sums(
        call,
        operands,
        logits=logits + (2 * call.sum_size + size) * features,
        block_logit=size,
        bias_vectors=6,
    )
    return replace(counts, block_row=counts.block_row + call.sum_size * features)


def _exponentials(call: Call, operands: Operands) -> ByteCounts:
    """Count bfloat16 exponentials, and float32 partial sums for every 128 classes."""
    needs_grad, size, sum_size = call.needs_grad, operands.dtype.itemsize, call.sum_size
    row = (call.V + 8) * size if needs_grad.some else 0
    row += sum(
        D_k * size
        for D_k, grad, scales in zip(call.features, needs_grad.weights, operands.scales_in_gradient)
        if grad and not scales
    )
    counts = _counts(call, operands, logits=row, block_logit=sum_size, vectors=160, bias_vectors=11)
    fixed, target_rows_bytes = counts.fixed, 0
    if counts.weight_sum:
        fixed += 4 * call.V  # the place of each class in the sorted targets
    # Label smoothing adds to every row of the gradient, so a single GEMM would not be its only
    # writer.
    is_bfloat16 = call.head.weights[0].dtype == torch.bfloat16
    if is_bfloat16 and call.options.few_tokens and not call.options.label_smoothing:
        target_rows_bytes = TARGETS * (call.N * size + call.D * sum_size)
    return replace(
        _with_packed_sum(counts, call),
        fixed=fixed,
        target_rows_bytes=target_rows_bytes,
        partials_bytes=call.V // 32 * _partial_sums(call),
        product=max((D_k * sum_size for D_k in _with_gradient(call)), default=0),
        longest=max(ENOUGH_ROWS, MOST_BYTES // (call.V * size)) if needs_grad.some else 0,
        class_blocks=_class_blocks(call, operands) if counts.weight_sum else None,
    )


MODELS: dict[str, Callable[[Call, Operands], ByteCounts]] = {
    "soft_targets": _soft_targets,
    "exponentials": _exponentials,
    "cpu_exponentials": _cpu_exponentials,
    "logits_triton": _logits_triton,
    "logits_torch": _logits_torch,
}


def _on_float32_sums(
    call: Call, operands: Operands, *, logits: int, block_logit: int, bias_vectors: int = 3
) -> ByteCounts:
    """Return the counts of an engine that sums each token's rows of dX in float32."""
    sums = sum(D_k * call.sum_size for D_k in _with_gradient(call))
    return _counts(call, operands, logits=logits + sums, block_logit=block_logit, bias_vectors=bias_vectors)


def _counts(
    call: Call, operands: Operands, *, logits: int, block_logit: int, vectors: int = 64, bias_vectors: int
) -> ByteCounts:
    """Return what all engines need.

    `logits` are the bytes of a token's logits and what goes with them, `vectors` bytes of small
    vectors per token, and `bias_vectors` how many vectors [V] a bias takes: the bias, its gradient,
    a chunk's share of that gradient, and temporaries of their size.
    """
    head, device, sum_size, size = call.head, call.device, call.sum_size, operands.dtype.itemsize
    weight, *others = head.weights
    token_bytes, gathered = logits + STATISTICS * sum_size, 0
    for input, copied in zip(head.inputs, operands.copies_rows):
        if copied:
            of_row, of_part = copied_bytes(input, operands.dtype)
            token_bytes, gathered = token_bytes + of_row, max(gathered, of_part)
    further = 0
    for other, grad in zip(others, call.needs_grad.weights[1:]):  # small, and always accumulated
        further += _sum_bytes(call, other, grad)
        if other.dtype != operands.dtype or not multiplies(other):
            further += call.V * other.shape[1] * size
    # A CUDA allocation is a multiple of 512 bytes, and about eighty vectors and numbers are
    # smaller.
    fixed = (vectors + 16 * sum_size) * call.N + gathered + further + (65536 if device == "cuda" else 8192)
    if head.bias is not None:
        fixed += bias_vectors * call.V * sum_size
    if call.call_kind.class_weights:
        fixed += call.V * sum_size
    # On CUDA another dtype means autocast: one copy of the whole weight, which no workspace
    # includes.
    copies_weight = (weight.dtype != operands.dtype and device == "cpu") or not multiplies(weight)
    weight_sum = _sum_bytes(call, weight, call.needs_grad.weights[0])
    # On the CPU half of a packed sum lies in the gradient's memory (in_torch.py).
    packs = device == "cpu" and weight.dtype.itemsize * 2 == sum_size
    return ByteCounts(
        N=call.N,
        D=call.D,
        V=call.V,
        device=device,
        fixed=fixed,
        token_bytes=token_bytes,
        weight_sum=weight_sum,
        weight_copy=call.D * size if copies_weight else 0,
        class_sum=call.D * sum_size,
        block_logit=block_logit,
        block_row=2 * size * sum(call.features),
        product_rows=PRODUCT_ROWS,
        further_terms=further,
        packed_sum=min(weight_sum, (call.V - call.V // 2) * call.D * sum_size) if packs else 0,
    )


def _with_packed_sum(counts: ByteCounts, call: Call) -> ByteCounts:
    """Return the counts with the packed sum of a bfloat16 gradient (packed_triton.py).

    It takes one byte per weight beyond the gradient's memory, or half a byte.
    """
    if call.head.weights[0].dtype != torch.bfloat16:
        return counts
    V, D = counts.V, counts.D
    half = min(counts.weight_sum, V * D // 2)
    maps_sum = half > 0 and D % 16 == 0  # the tensor map of the lower bits requires it
    return replace(
        counts,
        packed_sum=min(counts.weight_sum, V * D),
        packed_sum_20=half,
        pipelined=maps_sum
        and backend.pipelines_on(call.head.device)
        and backend.is_large_gemm(V, D, ENOUGH_ROWS),
    )


def _class_blocks(call: Call, operands: Operands) -> ClassBlocks:
    """Return the bytes of the two sweeps of the exponentials engine."""
    size, sum_size, needs_grad = operands.dtype.itemsize, call.sum_size, call.needs_grad
    copies = sum(D_k * size for D_k, copied in zip(call.features, operands.copies_rows) if copied)
    return ClassBlocks(
        N=call.N,
        D=call.D,
        V=call.V,
        step=ROW_TILE[call.device],
        exponential=size,
        partials=2 * sum_size if needs_grad.scale else sum_size,
        statistics=call.V // 32 * _partial_sums(call),
        largest=(call.V // ROW_TILE[call.device] + 4) * sum_size,
        row=STATISTICS * sum_size + copies + sum(D_k * sum_size for D_k in _with_gradient(call)),
        gradient_row=copies + (40 if needs_grad.bias else 0),  # db is a GEMM with ones
        class_sum=call.D * sum_size + (64 if needs_grad.bias else 0),
    )


def _with_gradient(call: Call) -> list[int]:
    """Return the features of each input that gets a gradient."""
    return [D_k for D_k, grad in zip(call.features, call.needs_grad.inputs) if grad]


def _sum_bytes(call: Call, weight: torch.Tensor, grad: bool) -> int:
    """Return the bytes of the float32 accumulator of a rounded weight gradient; else 0."""
    rounded = grad and weight.dtype != call.options.sum_dtype
    return call.V * weight.shape[1] * call.sum_size if rounded else 0


def _partial_sums(call: Call) -> int:
    """Return how many partial sums the exponentials engine keeps per row and half tile."""
    return 1 + (3 if call.call_kind.log_probs else 0) + (1 if call.needs_grad.scale else 0)
