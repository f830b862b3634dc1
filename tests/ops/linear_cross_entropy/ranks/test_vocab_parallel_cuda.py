"""Divided heads on cards: real heads' sizes, a step that waits for no card, one in a CUDA graph."""

import pytest
import torch

from tests.support.cards import on_cards
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

MATRIX = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks"
CARDS = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_cards"
REAL = "real bfloat16"


@pytest.mark.parametrize("device", [on_cards(2)])
def test_real_sizes(tmp_path, device):
    """Uneven shards of a large vocabulary, by the engine without logits, auto's choice for them."""
    pytest.importorskip("triton")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper card")
    for rank in run_ranks(MATRIX, tmp_path / "store", [REAL], device=device):
        found = rank[REAL]
        assert "raised" not in found, found
        assert not found["failed"]
        assert found["count"] > 60
        assert found["engines"].keys() == {"exponentials"}


@pytest.mark.parametrize("device", [on_cards(2)])
@pytest.mark.parametrize("scenario", ["no_waiting", "in_a_graph"])
def test_scenario(tmp_path, device, scenario):
    """Each asserts what it finds, on every rank, in processes of its own: a graph may end them."""
    for rank in run_ranks(CARDS, tmp_path / "store", [scenario], device=device):
        assert "raised" not in rank[scenario], rank[scenario]
