"""Divided heads on the engines that store exponentials in place of logits: exact with every option, whatever
the shards, with the collectives of the other engines.
"""

import pytest
import torch.distributed as dist

from lowtide.core.cpu_gemm import gemm
from tests.ops.linear_cross_entropy.vocab_parallel_exponentials import SCENARIOS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)

MATRIX = "tests.ops.linear_cross_entropy.vocab_parallel_ranks"
RANKS = "tests.ops.linear_cross_entropy.vocab_parallel_exponentials"
EXTENDED = pytest.mark.extended
ENGINES = ("cpu_exponentials", pytest.param("exponentials", marks=EXTENDED))


def ranks_of(module: str, tmp_path, kinds: list[str], engine: str, ranks: int = 2) -> list[dict]:
    """What the ranks found, the engine of a Hopper card in Triton's interpreter."""
    if engine == "exponentials":
        pytest.importorskip("triton")
    elif not gemm.available():
        pytest.skip(f"the CPU's products of bfloat16 cannot run: {gemm.against()}")
    kinds = [f"{kind} on {engine}" for kind in kinds]
    interpreted = engine == "exponentials"
    return run_ranks(module, tmp_path / "store", kinds, ranks=ranks, interpreted=interpreted)


@pytest.mark.parametrize(
    ("engine", "kind", "ranks"),
    [
        ("cpu_exponentials", "few bfloat16", 3),
        pytest.param("cpu_exponentials", "all bfloat16", 2, marks=EXTENDED),
        ("exponentials", "6 float32", 2),
        pytest.param("exponentials", "few float32", 2, marks=EXTENDED),
        pytest.param("exponentials", "24 float32", 3, marks=EXTENDED),
    ],
)
def test_values(tmp_path, engine, kind, ranks):
    """The matrix of test_vocab_parallel.py, and that the engine ran where it could."""
    for rank in ranks_of(MATRIX, tmp_path, [kind], engine, ranks):
        (found,) = rank.values()
        assert "raised" not in found, found["raised"]
        assert not found["failed"]
        assert found["engines"][engine] > found["count"] / 4


@pytest.mark.parametrize("engine", ENGINES)
def test_scenarios(tmp_path, engine):
    """Each asserts what it finds, on every rank."""
    for rank in ranks_of(RANKS, tmp_path, [*SCENARIOS], engine):
        for kind, found in rank.items():
            assert "raised" not in found, f"{kind}: {found['raised']}"
