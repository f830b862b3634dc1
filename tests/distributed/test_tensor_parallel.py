"""Tensor parallel heads of models with deferred logits: fused, and one process's gradients."""

import pytest

from tests.support.cards import DEVICES
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

FUSED = [
    *("gathered", "gathered, bias", "gathered, logsumexp", "loss parallel", "loss parallel, bias"),
    *("gathered, shifted", "gathered, shifted, bias", "transformers"),
]
REAL = ["gathered, real"]
LOCAL = "local"
CHUNKED = ["chunked, loss parallel", "chunked, loss parallel, bias", "chunked, loss parallel, recompute"]


@pytest.fixture(scope="module", params=DEVICES)
def results(request, tmp_path_factory):
    pytest.importorskip("transformers")
    store = tmp_path_factory.mktemp("ranks") / "store"
    kinds = [*FUSED, *REAL, *CHUNKED, LOCAL]
    return run_ranks("tests.distributed.tensor_parallel_ranks", store, kinds, device=request.param)


@pytest.mark.parametrize("kind", [*FUSED, *REAL])
def test_exact(results, kind):
    """Of a head that gathers its logits, of torchtitan's, which does not, and of tp_plan="auto"."""
    if kind == "transformers":
        pytest.importorskip("accelerate")  # loading by a plan needs it
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]
        assert all(each <= 1e-6 for each in rank[kind]["errors"].values())
        assert rank[kind]["fused"] == (2 if "logsumexp" in kind else 1)
        assert rank[kind]["materialized"] == ({"torch.sin": 1} if kind in REAL else {})


def test_local_logits_refused(results):
    """A loss of one rank's classes, computed by code of its own."""
    for rank in results:
        assert "Give the head the output layout Replicate()" in rank[LOCAL]["raised"]


@pytest.mark.parametrize("kind", CHUNKED)
def test_chunked_loss(results, kind):
    """The head is torchtitan's, whose logits are DTensors, in float64."""
    for rank in results:
        assert "raised" not in rank[kind], rank[kind]["raised"]
        assert all(each <= 1e-14 for each in rank[kind]["errors"].values())
