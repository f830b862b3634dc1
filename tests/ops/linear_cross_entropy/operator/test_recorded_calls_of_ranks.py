"""A divided call that is recorded has the bits of the call that was not, on each rank.

recorded_ranks.py has the scenarios; the engine of a Hopper card runs in Triton's interpreter.
"""

import pytest
import torch

from tests.support.cards import on_cards
from tests.support.ranks import needs_gloo, run_ranks

pytest.importorskip("triton")
pytestmark = needs_gloo

RANKS = "tests.ops.linear_cross_entropy.operator.recorded_ranks"
CHANGES = ["other_sizes_of_one_rank", "used_results", "errors", "new_group"]
EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    ("device", "scenarios"),
    [
        ("cpu", ["same_bits_of_few"]),
        pytest.param("cpu", CHANGES[2:], marks=EXTENDED),
        pytest.param("cpu", ["same_bits", *CHANGES[:2]], marks=EXTENDED),
        on_cards(2, ["same_bits", *CHANGES]),
    ],
    ids=str,
)
def test_scenarios(tmp_path, device, scenarios):
    """Each asserts what it finds, on every rank."""
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper card")
    interpreted = device == "cpu"
    store = tmp_path / "store"
    for rank in run_ranks(RANKS, store, scenarios, ranks=2, device=device, interpreted=interpreted):
        for kind, found in rank.items():
            assert "raised" not in found, f"{kind}: {found['raised']} at {found['at']}"
