"""FSDP2 over data-parallel ranks and tensor parallelism at once: the gradients of one process."""

import pytest

from tests.distributed.two_dimensional_ranks import KINDS
from tests.support.cards import on_cards
from tests.support.ranks import needs_gloo, run_ranks

pytestmark = needs_gloo


@pytest.mark.parametrize("device", ["cpu", on_cards(4)])
def test_gradients(tmp_path, device):
    """With the loss inside and outside of the unit's forward, and with deferred logits."""
    module = "tests.distributed.two_dimensional_ranks"
    for rank in run_ranks(module, tmp_path / "store", KINDS, ranks=4, device=device):
        for kind in KINDS:
            assert "raised" not in rank[kind], rank[kind]["raised"]
            assert rank[kind]["fused"] == 1
            assert len(rank[kind]["errors"]) == 6
            assert max(rank[kind]["errors"].values()) < 1e-6, kind
