"""Tell which calls the soft_targets engine runs, and how many bytes it holds.

Shapes: V classes.
"""

from lowtide.ops.linear_cross_entropy.planning import requirements
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.engine_spec import EngineSpec
from lowtide.ops.linear_cross_entropy.planning.memory_model import counts_with_float32_sums, with_packed_sum
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess


def unsupported_reason(call: Call, backend: str) -> str | None:
    """Return why the engine cannot run the call, or None.

    16-bit distances are not exact enough for some calls. Class probabilities with more digits than
    bfloat16 may be nearer to p than half a step of a distance. The slope of a soft cap, and the
    scale's gradient, a sum of gradients times logits, need more digits, too. Rows whose length is
    no multiple of 16 would be loaded one number at a time.
    """
    if call.call_kind.soft_dtype not in requirements.EXPONENTIAL_DTYPES:  # decision 0018
        return "it takes only class probabilities, in bfloat16"
    if call.options.softcap:
        return "it takes no soft cap"
    if call.needs_grad.scale:
        return "it takes no learned scale"
    if call.V % 16 != 0:
        return "it takes only classes in a multiple of 16"
    return requirements.tiles_unsupported_reason(call, backend)


def memory(call: Call, access: OperandAccess) -> ByteCounts:
    """Count 16-bit distances, and four float32 partial sums for every 128 classes.

    2048 bytes are added per token, since tests in Triton's interpreter have smaller tiles.
    """
    logits = call.V // 8 + 2048
    if call.needs_grad.some:
        logits += (call.V + 8) * access.dtype.itemsize
    counts = counts_with_float32_sums(call, access, logits=logits, block_logit=call.sum_size)
    return with_packed_sum(counts, call)


SPEC = EngineSpec(unsupported_reason, memory)
