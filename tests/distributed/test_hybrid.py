"""A head of lowtide.shard_head beside DDP, and FSDP2 that shards and replicates: one process's."""

import pytest

from tests.support.cards import on_cards
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo

EXACT = ("flattened", "flattened, clipped", "ddp")
REFUSED = ("shard", "shard, real logits")  # they come last, as they leave FSDP's hooks halfway


@pytest.mark.parametrize("device", ["cpu", on_cards(4)])
def test_replicas(tmp_path, device):
    """A head over all ranks that average gradients is exact; over some of them, it is refused."""
    module = "tests.distributed.hybrid_ranks"
    kinds = (*EXACT, *REFUSED)
    for rank in run_ranks(module, tmp_path / "store", kinds, ranks=4, device=device):
        for kind in EXACT:
            assert "raised" not in rank[kind], rank[kind]["raised"]
            assert rank[kind]["fused"] == 3
            assert len(rank[kind]["errors"]) == 4
            assert max(rank[kind]["errors"].values()) < 1e-14, kind
        for kind in REFUSED:
            assert "call shard_head with one dimension of all of them" in rank[kind]["raised"]
            assert "2 of the 4 ranks" in rank[kind]["raised"]
