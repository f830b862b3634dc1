"""Which engine takes a call, and why: the functions that choose at run time, asked without running anything.
Their answers hang on shapes, strides, dtypes and the device, so the tensors may be fake ones.
"""

from typing import NamedTuple

from lowtide.attention import engines, entry
from lowtide.attention.masks import AttentionBias, Band
from lowtide.attention.problem import Operands, Options


class Engine(NamedTuple):
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
    """Of the call that `entry.attention` takes with these. Raises what that raises."""
    operands = entry.prepared(operands, mask)
    choice = entry.choose(operands, mask, window, options, with_logsumexp)
    if choice.backend == "sdpa":
        return Engine("sdpa", "torch's own kernels compute the same exactly, in O(M) memory")
    if choice.backend == "reference":
        return Engine("reference", "it is named: all scores at once, O(M N) memory")
    name = engines.chosen(operands, options._replace(backend=choice.backend))
    if choice.backend != "auto":
        return Engine(name, "it is named")
    reasons = [f"not sdpa: {choice.reason}"]
    if name == "torch":
        refusal = engines.reason_against_triton(operands)
        reasons.append(f"not triton: {refusal or 'on the CPU its interpreter runs by name'}")
    return Engine(name, "; ".join(reasons))
