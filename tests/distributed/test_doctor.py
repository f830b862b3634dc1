"""What `lowtide doctor` says that a divided call moves is what its ranks issue, call by call."""

from dataclasses import replace

import pytest

from tests.distributed.doctor_ranks import CALLS, PLAIN
from tests.support.cards import DEVICES
from tests.support.commands import invoke, said
from tests.support.extended import all_extended_but, asked
from tests.support.ranks import needs_gloo, run_ranks

# Each chunk is a few collectives, each of milliseconds.
OF_CHUNKS = [kind for kind in CALLS if CALLS[kind].workspace != PLAIN.workspace]
QUICK = [kind for kind in CALLS if kind not in OF_CHUNKS or kind == "chunks, none, tokens"]


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    store = tmp_path_factory.mktemp("ranks") / "store"
    kinds = asked(request, "kind", CALLS)
    return run_ranks("tests.distributed.doctor_ranks", store, kinds, device=request.param)


@needs_gloo
@pytest.mark.parametrize("kind", all_extended_but(QUICK, CALLS))
def test_collectives_and_bytes(results, kind):
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]
        assert rank[kind]["counted"] == rank[kind]["told"]


def test_bytes_are_those_of_the_documents():
    """The table of docs/howto/divided_head.md, for N 120, D 16 and V 501 on two ranks."""
    call = replace(PLAIN, workspace=2**20)  # one chunk
    moved = {each.what: (each.kind, each.times, each.bytes) for each in call.collectives()}
    assert moved == {
        "the agreement": ("gather", 1, 2048),
        "statistics": ("gather", 1, 12 * 120),
        "the input's gradient": ("sum", 1, 4 * 16 * 120),
    }


def test_one_line():
    sizes = ("--tokens", "120", "--features", "16", "--classes", "501", "--dtype", "float32")
    call = ("doctor", "linear-cross-entropy", "--device", "cpu", *sizes, "--workspace", "1MiB", "--ranks")
    line = said(invoke(*call, "2"))
    assert (
        "2 ranks each has 251 of 501 classes and all tokens; moves: gather of the agreement (2 KiB), " in line
    )
    assert "gather of statistics (1.41 KiB), sum of the input's gradient (7.5 KiB)" in line
    assert "not cpu_exponentials" in line
    assert "times" not in line
    many = said(invoke(*call, "2", "--workspace", "64KiB"))
    assert "rows 8 a chunk, 15 chunks" in many
    assert "gather of statistics (15 times, 1.41 KiB in all), sum of the input's gradient (15 times, " in many
    assert many.rstrip().endswith("7.5 KiB in all)")
    line = said(invoke(*call, "3", "--tokens-sharded"))
    assert "3 ranks each has 167 of 501 classes and 40 of 120 tokens; moves: " in line
    assert "gather of targets (320 bytes)" in line
    assert "sum and scatter of the input's gradient (7.5 KiB)" in line
    assert "ranks" not in said(invoke(*call, "1"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tokens-sharded",), "--tokens-sharded needs --ranks 2 or more"),
        (
            ("--tokens-sharded", "--ranks", "2", "--probabilities", "float32"),
            "needs targets that are classes",
        ),
        (("--ranks", "2", "--backend", "reference"), "backend must be 'auto', 'triton' or 'torch'"),
        (("--ranks", "2", "--segments", "3"), "choose segments that the number of ranks divides"),
        (("--log-probs", "--weight"), "--log-probs is linear_log_probs"),
        (("--ranks", "0"), "should be greater than or equal to 1"),
    ],
)
def test_call_refused(options, message):
    done = invoke("doctor", "linear-cross-entropy", "--device", "cpu", *options)
    assert done.exit_code in (1, 2)
    assert message in said(done)
