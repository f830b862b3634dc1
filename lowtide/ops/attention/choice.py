"""Say which backend takes a call, and why, without running anything.

It calls the functions that choose at run time. Their answers depend on shapes, strides, dtypes and
the device alone, so the tensors may be fake ones.
"""

from typing import NamedTuple

from lowtide.ops.attention import dispatch
from lowtide.ops.attention.definition.masks import AttentionBias, Band
from lowtide.ops.attention.definition.operands import Operands, Options
from lowtide.ops.attention.operator import backends


class Engine(NamedTuple):
    """Hold the name of the backend that takes a call, and why it does."""

    name: str
    """"sdpa", "triton", "torch" or "reference"."""
    reason: str


def engine(
    operands: Operands,
    mask: AttentionBias | None,
    window: Band | None,
    options: Options,
    with_logsumexp: bool = False,
) -> Engine:
    """Return the backend of the call that `dispatch.attention` takes with these arguments.

    Raises what that call raises.
    """
    operands = dispatch.prepared(operands, mask)
    choice = dispatch.choose(operands, mask, window, options, with_logsumexp)
    if choice.backend == "sdpa":
        return Engine("sdpa", "torch's own kernels compute the same exactly, in O(M) memory")
    if choice.backend == "reference":
        return Engine("reference", "it is named: all scores at once, O(M N) memory")
    name = backends.chosen(operands, options._replace(backend=choice.backend))
    if choice.backend != "auto":
        return Engine(name, "it is named")
    reasons = [f"not sdpa: {choice.reason}"]
    if name == "torch":
        refusal = backends.reason_against_triton(operands)
        reasons.append(f"not triton: {refusal or 'on the CPU its interpreter runs by name'}")
    return Engine(name, "; ".join(reasons))
