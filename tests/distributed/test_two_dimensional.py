"""FSDP2 over data-parallel ranks and tensor parallelism at once: the gradients of one process."""

import pytest
import torch.distributed as dist

from tests.distributed.two_dimensional_ranks import KINDS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def test_gradients(tmp_path):
    """With the loss inside and outside of the unit's forward, and with deferred logits."""
    for rank in run_ranks("tests.distributed.two_dimensional_ranks", tmp_path / "store", KINDS, ranks=4):
        for kind in KINDS:
            assert "raised" not in rank[kind], rank[kind]["raised"]
            assert rank[kind]["fused"] == 1
            assert len(rank[kind]["errors"]) == 6
            assert max(rank[kind]["errors"].values()) < 1e-6, kind
