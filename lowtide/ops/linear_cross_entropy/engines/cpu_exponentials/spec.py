"""Say which calls the exponentials engine runs on a CPU, and how many bytes they take.

Shapes: D_k features of term k, V classes.
"""

from dataclasses import replace

from lowtide.core.strides import multiplies
from lowtide.ops.linear_cross_entropy.planning.byte_counts import ByteCounts
from lowtide.ops.linear_cross_entropy.planning.call import Call
from lowtide.ops.linear_cross_entropy.planning.engine_spec import EngineSpec
from lowtide.ops.linear_cross_entropy.planning.memory_model import (
    SAMPLED_CLASSES,
    counts_with_float32_sums,
    with_rounded_blocks,
)
from lowtide.ops.linear_cross_entropy.planning.operands import OperandAccess
from lowtide.ops.linear_cross_entropy.planning.requirements import units_unsupported_reason

# Classes of a product with a few vectors: their operands and result take memory beside a chunk's.
VECTOR_BLOCK = 4096


def unsupported_reason(call: Call, backend: str) -> str | None:
    weight, *others = call.head.weights
    options, call_kind = call.options, call.call_kind
    # All ranks of a sharded head must choose the same engine, but the layouts of their weights may
    # differ. So accept any layout; `readable` of operator/planner.py copies a weight if needed.
    strided = not multiplies(weight) and not options.sharded
    refused = {
        "it takes only a weight whose features or classes lie side by side": strided,
        "it takes only one linear term": others,
        "it computes a loss, and no log-probabilities": call_kind.log_probs,
        "it takes only class indices": call_kind.probabilities,
        "it takes no learned scale": call_kind.needs_grad.scale,
        "it takes no soft cap of a divided head": options.softcap and options.sharded,
        "it takes no label smoothing of a divided head": options.label_smoothing and options.sharded,
        "it takes no soft cap with label smoothing": options.label_smoothing and options.softcap,
        "it takes only a soft cap from 2^-100 to 2^100": options.softcap and not _in_range(options.softcap),
        "it takes only a head whose classes are not divided into segments": options.segments,
    }
    return units_unsupported_reason(call, backend, refused)


def _in_range(softcap: float) -> bool:
    """Return True for a cap that float32 holds, with its quotients."""
    return 2.0**-100 <= softcap <= 2.0**100


def memory(call: Call, access: OperandAccess) -> ByteCounts:
    """Count per token its exponentials, and two float32 rows of D numbers besides that of dX.

    They are the target's weight, and the row of X times this weight.
    """
    size, features = access.dtype.itemsize, sum(call.features)
    logits = call.V * size if call.needs_grad.some else 0
    counts = counts_with_float32_sums(
        call, access, logits=logits + 2 * call.sum_size * features, block_logit=size, bias_vectors=3
    )
    # Sums over blocks of classes: three float32 columns of the bias's gradient; or class weights in
    # bfloat16 parts, their temporaries, and sums of features.
    of_block = 12 if call.head.bias is not None else 0
    if call.options.label_smoothing:
        of_block = 20
        counts = replace(counts, fixed=counts.fixed + 24 * call.D)
    counts = replace(counts, fixed=counts.fixed + of_block * min(call.V, VECTOR_BLOCK))
    counts = replace(counts, block_row=counts.block_row + call.sum_size * features)
    return with_rounded_blocks(counts, call)


def shard_token_bytes(call: Call, counts: ByteCounts) -> int:
    """Count two chunks, which exist together, and the sampled logits of a first reference."""
    return 2 * counts.token_bytes + SAMPLED_CLASSES * call.sum_size


SPEC = EngineSpec(unsupported_reason, memory, shard_token_bytes)
