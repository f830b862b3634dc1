"""Holds estimates of one rank against what processes hold."""

import pytest

from lowtide.tools.estimate.step import estimate
from tests.support.ranks import RANKS, needs_gloo, run_ranks
from tests.tools.estimate.training_ranks import parsed

# The marks of files that start processes.
MARKS = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning"),
    needs_gloo,
]


def compare(tmp_path, kinds, ranks=RANKS):
    """Asserts that what is foretold of each scenario is the largest peak of the processes."""
    measured = run_ranks("tests.tools.estimate.training_ranks", tmp_path / "store", kinds, ranks=ranks)
    for kind in kinds:
        peaks = [rank[kind].get("peak", rank[kind]) for rank in measured]
        foretold = estimate(*parsed(kind), "cpu").peak
        # With the default workspace, the plan of a head counts copies that the CPU makes block by
        # block.
        allowed = 0.1 if "shard_head" in kind and "workspace" not in kind else 0.03
        assert foretold == pytest.approx(max(peaks), rel=allowed), (kind, foretold, peaks)
