"""Count what a call of a head divided over ranks moves (docs/howto/divided_head.md explains it).

Shapes: N tokens of all ranks, padded to the same number on each; D features.
"""

from typing import NamedTuple

from lowtide.ops.linear_cross_entropy.planning.call import EXCLUDING
from lowtide.ops.linear_cross_entropy.planning.plan import Plan
from lowtide.ops.linear_cross_entropy.ranks.messages import MESSAGE_BYTES
from lowtide.tools.units import readable

INDEX_BYTES = 8


class Collective(NamedTuple):
    """Hold a collective that a step issues `times` times; `bytes` is one rank's part, in all."""

    kind: str
    what: str
    times: int
    bytes: int

    def __str__(self) -> str:
        size = readable(self.bytes, ".3g")
        moved = f"{self.times} times, {size} in all" if self.times > 1 else size
        return f"{self.kind} of {self.what} ({moved})"


def collectives(
    plan: Plan, *, tokens: int, rank_tokens: int, features: int, chunk: int, row_factors: int, compared: int
) -> list[Collective]:
    """Return the collectives of a call and, if it has gradients, of its backward.

    Args:
        plan: the plan of a rank that has the most tokens; its options say how the classes are
            divided.
        tokens: the number of tokens of all ranks; none of them is ignored.
        rank_tokens: the most tokens that a rank passes.
        features: D.
        chunk: the number of tokens of a chunk, of all ranks together.
        row_factors: the number of tensors with a factor of each row.
        compared: the number of tensors on a device that must be equal on all ranks.
    """
    options, kind = plan.options, plan.call_kind
    own, ranks, number = options.tokens_sharded, options.ranks, options.sum_dtype.itemsize
    # Class probabilities already include weights and smoothing.
    weights = kind.class_weights and not kind.probabilities
    smoothing = options.label_smoothing > 0 and not kind.probabilities
    n = rank_tokens
    N = n * ranks if own else n
    chunks = -(-N // chunk)
    # Results by row have a backward of its own, which computes the logits again.
    again = plan.needs_grad.some and (options.reduction == "none" or kind.log_probs)
    calls = 1 + again
    agreements = calls * (2 if own and tokens % ranks else 1)
    # Each row has statistics and one upstream gradient; with log-probabilities, that of log_prob.
    excluding = options.engine in EXCLUDING
    vectors = calls * row_factors + (3 + kind.log_probs + excluding) * again
    totals = smoothing and (weights or not excluding)
    statistics = 3 + smoothing + kind.probabilities + 2 * kind.log_probs
    parts = -(-plan.options.num_classes // ranks)  # classes of a rank, and then its segments
    parts = -(-parts // options.shard.segment_classes) if options.segments else 1
    gradients = plan.needs_grad.inputs[0]
    found = [
        Collective("gather", "the agreement", agreements, agreements * MESSAGE_BYTES),
        Collective("gather", "fingerprints", calls * (compared > 0), calls * INDEX_BYTES * compared),
        Collective("gather", "targets", calls * own, calls * INDEX_BYTES * n),
        Collective("gather", "vectors of rows", vectors * own, vectors * number * n),
        Collective("sum", "the targets' weights", calls * weights, calls * number * N),
        Collective("gather", "the shards' totals", calls * totals, calls * number * parts),
        Collective(
            "gather", "tokens", calls * chunks * own, calls * plan.compute_dtype.itemsize * features * n
        ),
        Collective("gather", "statistics", chunks, statistics * number * parts * N),
        Collective(
            "sum and scatter" if own else "sum",
            "the input's gradient",
            chunks * gradients,
            number * features * N,
        ),
    ]
    return [each for each in found if each.times]
