"""Divided heads on the engines that store exponentials in place of logits: exact with every option,
whatever the shards, with the collectives of the other engines.
"""

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from tests.ops.linear_cross_entropy.ranks.vocab_parallel_exponentials import SCENARIOS
from tests.support.cards import on_cards
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

MATRIX = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks"
RANKS = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_exponentials"
EXTENDED = pytest.mark.extended
ENGINES = [
    ("cpu", "cpu_exponentials"),
    pytest.param("cpu", "exponentials", marks=EXTENDED),
    on_cards(2, "exponentials"),
]


def ranks_of(module: str, tmp_path, device: str, kinds: list[str], engine: str, ranks: int = 2) -> list[dict]:
    """What the ranks found, the engine of a Hopper card on the CPU in Triton's interpreter."""
    if engine == "exponentials":
        pytest.importorskip("triton")
    elif not gemm.available():
        pytest.skip(f"the CPU's products of bfloat16 cannot run: {gemm.against()}")
    if device == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper card")
    kinds = [f"{kind} on {engine}" for kind in kinds]
    interpreted = engine == "exponentials" and device == "cpu"
    return run_ranks(module, tmp_path / "store", kinds, ranks=ranks, device=device, interpreted=interpreted)


@pytest.mark.parametrize(
    ("device", "engine", "kind", "ranks"),
    [
        pytest.param("cpu", "cpu_exponentials", "few bfloat16", 3, marks=EXTENDED),
        pytest.param("cpu", "cpu_exponentials", "all bfloat16", 2, marks=EXTENDED),
        pytest.param("cpu", "exponentials", "6 float32", 2, marks=EXTENDED),
        pytest.param("cpu", "exponentials", "few float32", 2, marks=EXTENDED),
        pytest.param("cpu", "exponentials", "24 float32", 3, marks=EXTENDED),
        on_cards(2, "exponentials", "pairs bfloat16", 2),
        on_cards(4, "exponentials", "pairs bfloat16", 4, marks=[EXTENDED]),
    ],
)
def test_values(tmp_path, device, engine, kind, ranks):
    """The matrix of test_vocab_parallel.py, and that the engine ran where it could."""
    for rank in ranks_of(MATRIX, tmp_path, device, [kind], engine, ranks):
        (found,) = rank.values()
        assert "raised" not in found, found["raised"]
        assert not found["failed"]
        assert found["engines"][engine] > found["count"] / 4


@pytest.mark.parametrize(("device", "engine"), ENGINES)
def test_scenarios(tmp_path, device, engine):
    """Each asserts what it finds, on every rank."""
    for rank in ranks_of(RANKS, tmp_path, device, [*SCENARIOS], engine):
        for kind, found in rank.items():
            assert "raised" not in found, f"{kind}: {found['raised']}"
