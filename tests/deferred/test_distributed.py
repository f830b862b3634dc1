"""DDP and FSDP2 over two processes: the gradients of one process that has all of the data."""

import pytest

from tests.support.cards import DEVICES
from tests.support.graphs import needs_tracing
from tests.support.ranks import run_ranks

EXACT = [
    *("ddp", "ddp tied", "ddp outside", "ddp before", "ddp unused", "ddp unused outside"),
    *("fsdp", "fsdp outside", "fsdp before", "fsdp head kept", "fsdp head kept outside"),
    *("fsdp1", "fsdp1 outside", "fsdp1 before", "fsdp cast", "fsdp cast outside"),
]

COMPILED = [
    *("ddp unused of compiled", "ddp unused outside of compiled"),
    *("ddp unused compiled whole", "ddp unused outside compiled whole"),
]
FREED = ["fsdp head reshard", "fsdp head reshard outside", "fsdp1 head"]  # before the loss needs it


@pytest.mark.parametrize("device", DEVICES)
def test_exact_or_refused(tmp_path, device):
    """Those that raise come last, as they leave FSDP's hooks halfway."""
    kinds = [*EXACT, *FREED]
    ranks = run_ranks("tests.deferred.two_ranks", tmp_path / "store", kinds, device=device, strict=True)
    for rank in ranks:
        for kind in EXACT:
            assert rank[kind] == {"fused": 2, "materialized": {}}, kind
        for kind in FREED:
            assert "fully_shard(head, reshard_after_forward=False)" in rank[kind]["raised"]


@needs_tracing
@pytest.mark.parametrize("device", DEVICES)
def test_exact_compiled(tmp_path, device):
    """The model within DDP, or DDP as a whole, while DDP looks for unused parameters."""
    for rank in run_ranks("tests.deferred.two_ranks", tmp_path / "store", COMPILED, device=device):
        for kind in COMPILED:
            assert rank[kind] == {"fused": 2, "materialized": {}}, (kind, rank[kind])
