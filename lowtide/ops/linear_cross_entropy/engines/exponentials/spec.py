"""Say which calls the exponentials engine runs on a Hopper GPU, and what it holds.

Shapes: N tokens, D features (of the first linear term; D_k of term k), V classes.
"""

import operator
from dataclasses import replace

import torch

from lowtide.ops.linear_cross_entropy.planning.byte_counts import (
    PRODUCT_BYTES,
    ROW_TILE,
    ByteCounts,
    ClassBlocks,
    exponentials_stride,
    formed_again_bytes,
    forms_targets_again,
)
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.division.cost_model import parts_bytes
from lowtide.ops.linear_cross_entropy.planning.engine_spec import EngineSpec
from lowtide.ops.linear_cross_entropy.planning.memory_model import (
    SAMPLED_CLASSES,
    STATISTICS,
    counts_of,
    with_gradient,
    with_packed_sum,
)
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess
from lowtide.ops.linear_cross_entropy.planning.requirements import tiles_unsupported_reason
from lowtide.ops.linear_cross_entropy.planning.weight_gradient import ENOUGH_ROWS

# The most bytes of the exponentials of a chunk; with more, a step of shape A took 1 % longer, of D
# 1 to 3 %.
MOST_BYTES = 2 << 30  # decision 0044
# Beyond it float32 logits have no digits after the point, and an exponential that is not formed of
# the very bits of the maximum is 0 or infinite (transformed of row_math_triton.py). Without fused
# multiply-adds this kernel would spill registers.
LARGEST_CAP = 2.0**24


def unsupported_reason(call: Call, backend: str) -> str | None:
    reason = tiles_unsupported_reason(call, backend)
    if reason is None and call.options.segments:
        return "it takes only a head whose classes are not divided into segments"
    if reason is None and call.call_kind.probabilities:
        return "it takes only class indices"
    if reason is None and call.options.label_smoothing and call.options.softcap:
        # The smoothing term is of rank 1 only as long as no soft cap bends the logits.
        return "it takes no soft cap with label smoothing"
    if reason is None and call.options.softcap > LARGEST_CAP:
        return "it takes only a soft cap of at most 2^24"
    return reason


def memory(call: Call, access: OperandAccess) -> ByteCounts:
    """Count bfloat16 exponentials, and float32 partial sums for every 128 classes."""
    needs_grad, size, sum_size = call.needs_grad, access.dtype.itemsize, call.sum_size
    row = exponentials_stride(call.V) * size if needs_grad.some else 0
    row += sum(
        D_k * size
        for D_k, grad, scales in zip(call.features, needs_grad.weights, access.scales_in_gradient)
        if grad and not scales
    )
    counts = counts_of(call, access, logits=row, block_logit=sum_size, vectors=160, bias_vectors=11)
    fixed, one_product_row, target_rows_bytes = counts.fixed, 0, 0
    if counts.weight_sum:
        fixed += 4 * call.V  # the place of each class in the sorted targets
    # Label smoothing adds to every row of the gradient, so a single GEMM would not be its only
    # writer.
    is_bfloat16 = call.head.weights[0].dtype == torch.bfloat16
    if is_bfloat16 and call.options.few_tokens and not call.options.label_smoothing:
        one_product_row = counts.token_bytes
        again = forms_targets_again(call.N, call.D)
        target_rows_bytes = formed_again_bytes(call.N, call.D, size) if again else call.N * call.D
    parts, parts_row = parts_bytes(max(with_gradient(call), default=0), call.V)
    return replace(
        with_packed_sum(counts, call),
        fixed=fixed,
        one_product_row=one_product_row,
        softcap=call.options.softcap > 0,
        product_rows=_product_rows(counts.product_rows, max(call.features)),
        may_skip=_may_skip(call, access),
        gathered_row=sum(
            D_k * size for D_k, scales in zip(call.features, access.scales_in_gradient) if scales
        ),
        target_rows_bytes=target_rows_bytes,
        partials_bytes=call.V // 32 * _partial_sums(call),
        product=max((D_k * sum_size for D_k in with_gradient(call)), default=0),
        parts=parts,
        parts_row=parts_row,
        longest=max(ENOUGH_ROWS, MOST_BYTES // (call.V * size)) if needs_grad.some else 0,
        class_blocks=_class_blocks(call, access) if counts.weight_sum else None,
    )


def shard_token_bytes(call: Call, counts: ByteCounts) -> int:
    """Count one chunk, its rows of dX in float32, and the sampled logits of a first reference."""
    return counts.token_bytes + (sum(with_gradient(call)) + SAMPLED_CLASSES) * call.sum_size


def _may_skip(call: Call, access: OperandAccess) -> bool:
    """Return True if ignored rows may be skipped in this call.

    The gathered rows of X lie in memory that is counted: that of dX, that of the scaled rows for
    dW, or `gathered_row`. So each term forms one of the two. The forward of a call by row forms
    neither, and has no exponentials, for which the counts have V numbers a row.
    """
    holds_rows = all(map(operator.or_, call.needs_grad.weights, access.scales_in_gradient))
    return holds_rows and sum(call.features) <= call.V and not call.options.sharded


def _product_rows(rows: int, D: int) -> int:
    """Return the most rows of one dX GEMM: `rows`, or more for few features (decision 0079)."""
    while 8 * rows * max(D, 1) <= PRODUCT_BYTES:
        rows *= 2
    return rows


def _class_blocks(call: Call, access: OperandAccess) -> ClassBlocks:
    """Return the bytes of the two sweeps of the exponentials engine."""
    size, sum_size, needs_grad = access.dtype.itemsize, call.sum_size, call.needs_grad
    copies = sum(D_k * size for D_k, copied in zip(call.features, access.copies_rows) if copied)
    return ClassBlocks(
        N=call.N,
        D=call.D,
        V=call.V,
        step=ROW_TILE[call.device],
        exponential=size,
        gradient=call.D * call.head.weights[0].dtype.itemsize,
        partials=2 * sum_size if needs_grad.scale else sum_size,
        statistics=call.V // 32 * _partial_sums(call),
        largest=(call.V // ROW_TILE[call.device] + 4) * sum_size,
        product=sum(D_k * sum_size for D_k in with_gradient(call)),
        row=STATISTICS * sum_size + copies,
        gradient_row=copies + (40 if needs_grad.bias else 0),  # db is a GEMM with ones
        class_sum=call.D * sum_size + (64 if needs_grad.bias else 0),
        softcap=call.options.softcap > 0,
        copies_rows=any(access.copies_rows),
    )


def _partial_sums(call: Call) -> int:
    """Return how many partial sums the exponentials engine keeps per row and half tile."""
    return 1 + (3 if call.call_kind.log_probs else 0) + (1 if call.needs_grad.scale else 0)


SPEC = EngineSpec(unsupported_reason, memory, shard_token_bytes)
