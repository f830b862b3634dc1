"""Tell which calls the logits engine runs (in torch all of them), and how many bytes it holds.

Shapes: N tokens, D features, V classes.
"""

from dataclasses import replace

import torch

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts, padded_classes
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.call_memory import may_depend_on_tokens
from lowtide.ops.linear_cross_entropy.planning.engine_spec import EngineSpec
from lowtide.ops.linear_cross_entropy.planning.memory_model import (
    counts_with_float32_sums,
    with_gradient,
    with_rounded_blocks,
)
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess
from lowtide.ops.linear_cross_entropy.planning.requirements import (
    triton_unsupported_reason,
    units_unsupported_reason,
)

# dW is formed by a single GEMM only if its memory holds the float32 logits of this many rows, or
# of all tokens. With fewer rows, each GEMM of logits would read the whole weight for few rows.
# Beside a walk over tokens the only other way is class blocks, which are slower. So about one tile
# of rows is enough there, or half of the tokens.
FEWEST_ROWS, FEWEST_ROWS_OF_WALK = 256, 120  # decisions 0062, 0098 and 0105


def _memory_in_torch(call: Call, access: OperandAccess) -> ByteCounts:
    """Count float32 logits, and the temporaries of a softmax in torch."""
    options, call_kind, logit = call.options, call.call_kind, call.sum_size
    # For each of these the softmax holds two more tensors of the logits' size.
    several = (bool(options.softcap), call_kind.log_probs, call_kind.probabilities, call.needs_grad.scale)
    copies = 2 * sum(several) * call.sum_size
    # In torch a rounded gradient is a tensor of its own; on a CPU it lies in the logits' memory.
    rounds = access.dtype != options.sum_dtype
    if rounds and call.device != "cpu":
        logit += access.dtype.itemsize
    counts = counts_with_float32_sums(
        call,
        access,
        logits=padded_classes(call.V, call.device)
        * ((logit if call.needs_grad.some else call.sum_size) + copies),
        block_logit=logit + copies,
    )
    if not rounds or call.device != "cpu":
        return counts
    # A copy of the first row, which overlaps itself.
    return with_rounded_blocks(replace(counts, fixed=counts.fixed + call.V * call.sum_size), call)


def _memory_in_triton(call: Call, access: OperandAccess) -> ByteCounts:
    """Count float32 logits, which become their gradient in place.

    If dW is formed by a single GEMM, the logits lie in its memory. Then their half-precision
    gradient is counted instead, and the scaled rows of X by which dW's GEMM multiplies it.
    """
    logits = padded_classes(call.V, call.device) * call.sum_size
    counts = counts_with_float32_sums(call, access, logits=logits, block_logit=call.sum_size)
    if not _may_have_one_product(call, access, counts):
        return counts
    rows = rows_in_gradient(call.V, call.D, call.device)
    of_gradient = padded_classes(call.V, call.device) * access.dtype.itemsize
    own = counts.token_bytes + call.D * access.dtype.itemsize
    sums = sum(D_k * call.sum_size for D_k in with_gradient(call))
    in_gradient = own - logits - sums + of_gradient
    if not has_one_product(call, access):
        in_gradient = in_gradient if rows >= min(-(-call.N // 2), FEWEST_ROWS_OF_WALK) else 0
        own = own if rows < call.N else 0
        counts = replace(counts, rows_of_logits=rows, sum_row=sums, own_logits_row=own)
        return replace(counts, one_product_row=in_gradient)
    if rows < min(call.N, FEWEST_ROWS):
        return counts
    return replace(counts, one_product_row=in_gradient, rows_of_logits=rows)


def _two_chunks(call: Call, counts: ByteCounts) -> int:
    """Count two chunks, which exist at a time for a sharded head."""
    return 2 * counts.token_bytes


def _two_chunks_and_copy(call: Call, counts: ByteCounts) -> int:
    """Count two chunks, and a copy of the logits, from which torch computes the statistics."""
    return 2 * counts.token_bytes + call.V * call.sum_size


def rows_in_gradient(classes: int, features: int, device: str) -> int:
    """Return the rows of float32 logits that fit in the memory of a half-precision dW [V, D]."""
    return classes * features // 2 // padded_classes(classes, device)


def chunks_in_gradient(tokens: int, features: int, classes: int, device: str) -> int:
    """Return how many times dW's memory is filled with logits, until all tokens had their turn."""
    return -(-tokens // max(1, rows_in_gradient(classes, features, device)))


def _may_have_one_product(call: Call, access: OperandAccess, counts: ByteCounts) -> bool:
    """Return True if a single GEMM over all tokens may form dW, rounded as it is written."""
    return (
        counts.weight_sum > 0
        and access.dtype == call.head.weights[0].dtype  # half precision, as its sum is another one
        and not counts.weight_copy
        and not call.options.sharded
        and may_depend_on_tokens(call.head.tokens)
    )


def has_one_product(call: Call, access: OperandAccess) -> bool:
    """Return True if logits/one_product.py computes a call whose dW is a single GEMM.

    It takes bfloat16. Other calls walk over the tokens (engine.py). Before its GEMM for dW, dW's
    memory holds the float32 rows of dX, too; they fit if 2 N <= V.
    """
    head, needs_grad, call_kind = call.head, call.needs_grad, call.call_kind
    return (
        access.dtype == torch.bfloat16
        and call.options.reduction != "none"
        and not (call_kind.log_probs or call_kind.probabilities or needs_grad.scale)
        and len(head.inputs) == 1
        and head.inputs[0].dtype == head.weights[0].dtype
        and 2 * head.tokens <= call.V
    )


def _against_units(call: Call, backend: str) -> str | None:
    return units_unsupported_reason(call, backend, {})


def _runs_all(call: Call, backend: str) -> None:
    """Return None, because the engine can run every call."""


CPU = EngineSpec(_against_units, _memory_in_torch, _two_chunks_and_copy)
TORCH = EngineSpec(_runs_all, _memory_in_torch, _two_chunks_and_copy)
TRITON = EngineSpec(triton_unsupported_reason, _memory_in_triton, _two_chunks)
