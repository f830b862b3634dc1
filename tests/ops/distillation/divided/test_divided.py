"""Heads whose classes are divided over real processes: student and teacher, exact in every way."""

import pytest

from tests.support.cards import DEVICES, on_cards
from tests.support.extended import all_extended_but, asked
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

RANKS = "tests.ops.distillation.divided.divided_ranks"
SCENARIOS = ("excluded", "near_teacher", "errors", "compiled", "fsdp")


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    kinds = ["matrix float64", "matrix bfloat16", *asked(request, "scenario", SCENARIOS), "moved", "peak"]
    return run_ranks(RANKS, store, kinds, device=request.param)


def check_matrix(results, kind, least):
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]
        assert not rank[kind]["failed"]
        assert rank[kind]["count"] >= least


def test_values(results):
    """Loss and gradients against dense truth: layouts, ways to pass shards, divergences."""
    check_matrix(results, "matrix float64", 128)
    check_matrix(results, "matrix bfloat16", 24)


@pytest.mark.extended
@pytest.mark.parametrize(("device", "ranks"), [("cpu", 3), ("cpu", 4), on_cards(4, 4)])
def test_values_more_ranks(tmp_path, device, ranks):
    kinds = ["matrix float64", "matrix float32", "matrix float16"]
    found = run_ranks(RANKS, tmp_path / "store", kinds, ranks=ranks, device=device)
    for kind in kinds:
        check_matrix(found, kind, 24)


@pytest.mark.parametrize(
    "scenario", all_extended_but([each for each in SCENARIOS if each != "compiled"], SCENARIOS)
)
def test_scenario(results, scenario):
    """Each asserts what it finds, on every rank."""
    for rank in results:
        assert "raised" not in rank[scenario], rank[scenario]["raised"]


def test_collectives(results):
    """One gather of six numbers a row, two more for Jensen-Shannon; one sum of dX."""
    N, D, size = 24, 6, 4
    for rank in results:
        kl, js = ([tuple(each) for each in rank["moved"][name]] for name in ("forward", "js 0.5"))
        agreement, gradient = ("gather", 2048), ("sum_", N * D * size)
        assert kl == [agreement, ("gather", 6 * N * size), gradient]
        assert js == [agreement, ("gather", 6 * N * size), ("gather", 2 * N * size), gradient]


def test_memory(results):
    """Two chunks of both heads' logits at a time, and no logits of all rows."""
    for rank in results:
        found = rank["peak"]
        assert max(found["replicated"], found["tokens"]) <= found["workspace"] < found["logits"] // 4


@pytest.mark.extended
@pytest.mark.parametrize("device", ["cpu", on_cards(1)])
def test_triton(tmp_path, device):
    """The kernel's statistics of parts, merged, are those of all classes."""
    pytest.importorskip("triton")
    interpreted = device == "cpu"
    (rank,) = run_ranks(
        RANKS, tmp_path / "store", ["triton"], ranks=1, device=device, interpreted=interpreted
    )
    assert "raised" not in rank["triton"], rank["triton"]["raised"]
