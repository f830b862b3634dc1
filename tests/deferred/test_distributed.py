"""DDP and FSDP2 over two processes: the gradients of one process that has all of the data."""

from tests.ranks import run_ranks

MODULE = "tests.deferred.two_ranks"
STRICT = ("-W", "error::UserWarning")
EXACT = [
    *("ddp", "ddp tied", "ddp outside", "ddp before", "ddp unused", "ddp unused outside"),
    *("fsdp", "fsdp outside", "fsdp before", "fsdp head kept", "fsdp head kept outside"),
    *("fsdp1", "fsdp1 outside", "fsdp1 before"),
]


def test_exact(tmp_path):
    for rank in run_ranks(MODULE, tmp_path / "store", EXACT, *STRICT):
        assert rank == {kind: {"fused": 2, "materialized": {}} for kind in EXACT}


def test_a_head_that_is_freed_before_the_loss(tmp_path):
    kinds = ["fsdp head reshard", "fsdp head reshard outside", "fsdp1 head"]
    for rank in run_ranks(MODULE, tmp_path / "store", kinds, *STRICT):
        for kind in kinds:
            assert "fully_shard(head, reshard_after_forward=False)" in rank[kind]["raised"]
