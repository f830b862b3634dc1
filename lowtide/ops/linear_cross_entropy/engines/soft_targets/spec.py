"""Say which calls the soft-targets engine runs, and what it holds.

Shapes: V classes.
"""

from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.engine_spec import EngineSpec
from lowtide.ops.linear_cross_entropy.planning.memory_model import counts_with_float32_sums, with_packed_sum
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess


def unsupported_reason(call: Call, backend: str) -> str | None:
    """Return why 16-bit distances are not exact enough for the call or not fast to load, or None.

    Class probabilities with more digits than the operands may be nearer to p than a distance can
    tell. The slope of a soft cap, and a sum of gradients times logits, need more digits as well.
    Rows whose length is no multiple of 16 would be loaded element by element.
    """
    if call.call_kind.soft_dtype not in requirements.EXPONENTIAL_DTYPES:  # decision 0018
        return "it takes class probabilities in bfloat16"
    if call.options.softcap:
        return "it takes no soft cap"
    if call.needs_grad.scale:
        return "it takes no learned scale"
    if call.V % 16 != 0:
        return "it takes classes in a multiple of 16"
    return requirements.tiles_unsupported_reason(call, backend)


def memory(call: Call, access: OperandAccess) -> ByteCounts:
    """Count 16-bit distances, and four float32 partial sums for every 128 classes.

    The interpreter's tiles are smaller.
    """
    logits = call.V // 8 + 2048
    if call.needs_grad.some:
        logits += (call.V + 8) * access.dtype.itemsize
    counts = counts_with_float32_sums(call, access, logits=logits, block_logit=call.sum_size)
    return with_packed_sum(counts, call)


SPEC = EngineSpec(unsupported_reason, memory)
