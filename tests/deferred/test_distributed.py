"""DDP and FSDP2 over two processes: the gradients of one process that has all of the data."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXACT = {
    "ddp": ["ddp", "ddp tied", "ddp outside", "ddp before", "ddp unused", "ddp unused outside"],
    "fsdp": ["fsdp", "fsdp outside", "fsdp before", "fsdp head kept", "fsdp head kept outside"],
}


def two_ranks(kinds, store, environment):
    environment = environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.deferred.two_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, f"file://{store}", str(rank), *kinds],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), outputs[0][1] + outputs[1][1]
    return json.loads(outputs[0][0])


@pytest.mark.parametrize("kinds", EXACT.values(), ids=EXACT)
def test_exact(kinds, tmp_path, plain_environment):
    results = two_ranks(kinds, tmp_path / "store", plain_environment)
    for kind in kinds:
        found = results[kind]
        assert found == found | {"fused": 2, "materialized": {}}, (kind, found)
        assert found["error"] <= 50 * torch.finfo(torch.float64).eps, (kind, found)


def test_a_head_that_is_freed_before_the_loss(tmp_path, plain_environment):
    kinds = ["fsdp head reshard", "fsdp head reshard outside"]
    for kind, found in two_ranks(kinds, tmp_path / "store", plain_environment).items():
        assert "fully_shard(head, reshard_after_forward=False)" in found.get("raised", ""), (kind, found)
