"""Say which calls the logits engine runs (in torch all of them), and what it holds.

Shapes: V classes.
"""

from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.engine_spec import EngineSpec
from lowtide.ops.linear_cross_entropy.planning.memory_model import counts_with_float32_sums
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess, padded_classes
from lowtide.ops.linear_cross_entropy.planning.requirements import triton_unsupported_reason


def _memory_in_torch(call: Call, access: OperandAccess) -> ByteCounts:
    """Count float32 logits, and the temporaries of a softmax in torch."""
    options, call_kind, logit = call.options, call.call_kind, call.sum_size
    # Tensors as large as the logits that the softmax holds beside them.
    several = (bool(options.softcap), call_kind.log_probs, call_kind.probabilities, call.needs_grad.scale)
    copies = 2 * sum(several) * call.sum_size
    # Only the Triton kernel rounds in place: it does so before it stores a number.
    if access.dtype != options.sum_dtype:
        logit += access.dtype.itemsize
    return counts_with_float32_sums(
        call,
        access,
        logits=padded_classes(call.V, call.device)
        * ((logit if call.needs_grad.some else call.sum_size) + copies),
        block_logit=logit + copies,
    )


def _memory_in_triton(call: Call, access: OperandAccess) -> ByteCounts:
    """Count float32 logits, which become their gradient in place."""
    return counts_with_float32_sums(
        call, access, logits=padded_classes(call.V, call.device) * call.sum_size, block_logit=call.sum_size
    )


def _runs_all(call: Call, backend: str) -> None:
    """Return no reason, whatever the call."""


TORCH = EngineSpec(_runs_all, _memory_in_torch, takes_shards=True)
TRITON = EngineSpec(triton_unsupported_reason, _memory_in_triton, takes_shards=True)
