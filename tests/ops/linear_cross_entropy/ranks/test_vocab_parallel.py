"""Heads whose classes are divided over real processes: exact with every option and shard."""

import pytest

from tests.support.cards import DEVICES, needs_cards, on_cards
from tests.support.extended import all_extended_but, asked
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

MATRIX = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_ranks"
MODES = "tests.ops.linear_cross_entropy.ranks.vocab_parallel_modes"
EXTENDED = pytest.mark.extended


@pytest.mark.parametrize(
    ("device", "ranks", "kinds"),
    [
        ("cpu", 3, ["few float64"]),
        pytest.param("cpu", 3, ["pairs float64"], marks=EXTENDED),
        pytest.param("cpu", 2, ["all float64"], marks=EXTENDED),
        pytest.param("cpu", 3, ["pairs float32", "pairs bfloat16"], marks=EXTENDED),
        pytest.param("cpu", 4, ["pairs float64", "pairs float32"], marks=EXTENDED),
        on_cards(2, 2, ["pairs float64", "pairs float32", "pairs bfloat16", "few float16"]),
        on_cards(3, 3, ["pairs float64", "pairs float32", "pairs bfloat16"], marks=[EXTENDED]),
        on_cards(4, 4, ["pairs float64", "pairs float32"], marks=[EXTENDED]),
    ],
)
def test_values(tmp_path, device, ranks, kinds):
    """Loss, log-probabilities and gradients, against the dense truth of all classes and tokens."""
    for rank in run_ranks(MATRIX, tmp_path / "store", kinds, ranks=ranks, device=device):
        for kind in kinds:
            assert "raised" not in rank[kind], rank[kind]["raised"]
            assert not rank[kind]["failed"]
            assert rank[kind]["count"] > 70


SCENARIOS = (
    *("positions", "several_terms", "wanted_gradients", "ways_to_differentiate", "half_precision"),
    *("padded_vocabulary", "extremes", "module_and_sequences", "segments", "bad_arguments", "later_calls"),
    *("placed_positions", "losses_of_placed_tokens"),
    *("compiled", "ignored_rows", "errors_of_backward", "results_without_gradient", "told_later"),
)
SLOW = ("compiled", "results_without_gradient", "ignored_rows")
MEASURED = ("collectives_of_a_step", "peak")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu", 2), id="2"),
        pytest.param(("cpu", 4), id="4", marks=EXTENDED),
        pytest.param(("cuda", 2), id="cuda-2", marks=needs_cards(2)),
        pytest.param(("cuda", 4), id="cuda-4", marks=[*needs_cards(4), EXTENDED]),
    ],
)
def results(request, tmp_path_factory):
    """Of all scenarios, by rank."""
    store = tmp_path_factory.mktemp("ranks") / "store"
    device, ranks = request.param
    kinds = [*asked(request, "scenario", SCENARIOS), *MEASURED]
    if device == "cpu":  # on cards it has processes of its own
        kinds.append("killed")
    return run_ranks(MODES, store, kinds, ranks=ranks, device=device)


@pytest.mark.parametrize(
    "scenario", all_extended_but([each for each in SCENARIOS if each not in SLOW], SCENARIOS)
)
def test_scenario(results, scenario):
    """Each asserts what it finds, on every rank."""
    for rank in results:
        assert "raised" not in rank[scenario], rank[scenario]["raised"]


def test_collectives(results):
    """One gather of three numbers a row and chunk, one sum of dX a chunk; the same on all ranks.

    Options add numbers to a row, and one small collective a call.
    """
    N, D, size, ranks = 24, 6, 4, len(results)
    first = results[0]["collectives_of_a_step"]
    assert all(rank["collectives_of_a_step"] == first for rank in results)
    calls = {
        name: [tuple(each) for each in found["forward"]] for name, found in first.items() if name != "kind"
    }
    backward = {name: found["backward"] for name, found in first.items() if name != "kind"}
    agreement = ("gather", 2048)
    assert all(found[0] == agreement for found in calls.values())

    def total(found, kind):
        return sum(bytes for name, bytes in found[1:] if name == kind)

    for name in ("mean", "mean, one chunk", "class weights"):
        gathers = [bytes for kind, bytes in calls[name][1:] if kind == "gather"]
        assert sum(gathers) == 3 * N * size
        assert len(gathers) == (1 if "one" in name else 2)
        own = N * size if name == "class weights" else 0  # the weight of each target
        assert total(calls[name], "sum_") == N * D * size + own
        assert not backward[name]
    assert len(calls["mean"]) == 5
    assert total(calls["smoothing"], "gather") == 4 * N * size + size
    assert total(calls["frozen input"], "sum_") == 0
    assert total(calls["none"], "sum_") == 0
    assert total([tuple(each) for each in backward["none"]], "sum_") == N * D * size
    tokens = calls["tokens"]
    own = N // ranks
    assert total(tokens, "scatter_sum") == N * D * size
    assert total(tokens, "gather") == 8 * own + D * size * own + 3 * N * size  # targets, tokens, statistics


def test_memory(results):
    """Neither the logits of all rows nor those of all classes are held by any rank."""
    for rank in results:
        found = rank["peak"]
        for kind in ("replicated", "tokens"):
            assert found[kind]["beyond"] <= found["workspace"] < found["logits"] // 2
            assert found[kind]["largest"] < found["logits"] // 8


def check_killed(results, kind):
    """The others raise, long before the minute that their group would wait."""
    *others, last = results
    assert "error" not in last[kind]
    for rank in others:
        assert rank[kind]["seconds"] < 30
        assert "onnection" in rank[kind]["error"]


def test_killed_rank(results, tmp_path):
    if "killed" not in results[0]:
        ranks = len(results)
        results = run_ranks(MODES, tmp_path / "store", ["killed"], ranks=ranks, device="cuda")
    check_killed(results, "killed")


@pytest.mark.parametrize(
    "collective",
    ["gather", pytest.param("sum_", marks=EXTENDED), pytest.param("scatter_sum", marks=EXTENDED)],
)
def test_killed_in_a_chunk(tmp_path, collective):
    """Where others wait for a chunk's statistics, or for its rows of dX. (On cards their streams
    wait, and NCCL ends the processes.)"""
    kind = f"killed {collective}"
    check_killed(run_ranks(MODES, tmp_path / "store", [kind], ranks=3), kind)


@EXTENDED
@pytest.mark.parametrize("device", DEVICES)
def test_triton(tmp_path, device):
    """The pass that CUDA tensors take, on the CPU in the interpreter."""
    pytest.importorskip("triton")
    interpreted = device == "cpu"
    for rank in run_ranks(MODES, tmp_path / "store", ["triton"], device=device, interpreted=interpreted):
        assert "raised" not in rank["triton"], rank["triton"]["raised"]
