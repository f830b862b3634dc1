"""FSDP2 over data-parallel ranks and tensor parallelism at once: the gradients of one process."""

import pytest
import torch.distributed as dist

from tests.distributed.two_dimensional_ranks import KINDS
from tests.support.cards import on_cards
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


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
