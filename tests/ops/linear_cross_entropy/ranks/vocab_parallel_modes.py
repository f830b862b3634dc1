"""What test_vocab_parallel.py runs as several processes, beside the matrix of
vocab_parallel_ranks.py: the scenarios of modes/. A scenario returns what it counted.
"""

from typing import Any

from tests.ops.linear_cross_entropy.ranks.modes.costs import collectives_of_a_step, peak
from tests.ops.linear_cross_entropy.ranks.modes.ended_ranks import killed
from tests.ops.linear_cross_entropy.ranks.modes.errors import bad_arguments, later_calls, told_later
from tests.ops.linear_cross_entropy.ranks.modes.errors_of_backward import (
    errors_of_backward,
    results_without_gradient,
)
from tests.ops.linear_cross_entropy.ranks.modes.gradients import (
    compiled,
    half_precision,
    triton,
    wanted_gradients,
    ways_to_differentiate,
)
from tests.ops.linear_cross_entropy.ranks.modes.kinds_of_heads import (
    losses_of_placed_tokens,
    module_and_sequences,
    padded_vocabulary,
    placed_positions,
    positions,
    several_terms,
)
from tests.ops.linear_cross_entropy.ranks.modes.values import extremes, ignored_rows, segments

SCENARIOS = {
    each.__name__: each
    for each in (
        *(positions, several_terms, padded_vocabulary, module_and_sequences),
        *(placed_positions, losses_of_placed_tokens),
        *(wanted_gradients, ways_to_differentiate, half_precision, triton, compiled),
        *(extremes, ignored_rows, segments),
        *(bad_arguments, later_calls, told_later, errors_of_backward, results_without_gradient),
        *(collectives_of_a_step, peak),
    )
}


def run(kind: str, rank: int) -> dict[str, Any]:
    if kind.startswith("killed"):
        killed(rank, *kind.split()[1:])
    return SCENARIOS[kind]() or {}
