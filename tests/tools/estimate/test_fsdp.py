"""`lowtide estimate --fsdp`: one rank's peak without others, against what two processes hold."""

import json

import pytest
import torch
import torch.distributed as dist

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.step import estimate
from tests.tools.estimate.compare import MARKS, compare
from tests.tools.estimate.conftest import TINY_GPT2, TINY_LLAMA

pytestmark = MARKS

DEMO = [
    *("eager, demo-cpu, float32, adamw", "lowtide, demo-cpu, float32, adamw"),
    "lowtide, demo-cpu, float32, adamw, workspace, shard_head",
]
LLAMA = [
    *("eager, {}, bfloat16, adamw", "lowtide, {}, bfloat16, adamw"),
    *("lowtide, {}, bfloat16, adamw, shard_head", "lowtide, {}, bfloat16, adamw, workspace, shard_head"),
    *("eager, {}, autocast, sgd, checkpointing", "lowtide, {}, autocast, sgd, checkpointing, workspace"),
    "lowtide, {}, autocast, sgd, checkpointing, workspace, shard_head",
]


@pytest.mark.extended
def test_estimate_matches_two_processes(tmp_path):
    compare(tmp_path, DEMO)


@pytest.mark.extended
def test_estimate_of_transformers_matches_two_processes(tmp_path, config):
    pytest.importorskip("transformers")
    path = config(TINY_LLAMA)
    tied = tmp_path / "tied.json"
    tied.write_text(json.dumps(TINY_GPT2))
    compare(tmp_path, [*(kind.format(path) for kind in LLAMA), f"lowtide, {tied}, float32, adamw, workspace"])


def held(ranks, **options):
    return estimate(Setting("demo-cpu", 1, 64, fsdp=ranks, dtype=Dtype.float32, **options), Loss.lowtide).held


def test_ranks_divide_what_they_hold():
    """Optimizer states by the number of ranks; with shard_head the head is never gathered."""
    two, eight = held(2), held(8)
    assert eight["optimizer"] == pytest.approx(two["optimizer"] / 4, rel=0.01)
    head = 32_768 * 128 * 4
    whole, divided = held(8, workspace=2**20), held(8, workspace=2**20, shard_head=True)
    assert sum(whole.values()) - sum(divided.values()) > head


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_left_behind(monkeypatch, fails):
    before = torch.UntypedStorage.resize_
    if fails:
        monkeypatch.setattr("lowtide.tools.estimate.step.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            held(2)
    else:
        held(2)
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is before


def test_refused(config, tmp_path):
    pytest.importorskip("transformers")
    path = config(TINY_GPT2)  # whose head is tied
    with pytest.raises(UserError, match="--shard-head: the head's weight is also that of"):
        estimate(Setting(path, 1, 16, fsdp=2, shard_head=True), Loss.lowtide)
    with pytest.raises(UserError, match="Adafactor cannot step sharded parameters"):
        estimate(Setting(path, 1, 16, optimizer=Optimizer.adafactor, fsdp=2), Loss.eager)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="a rank of a process group already"):
            estimate(Setting("demo-cpu", 1, 16, Dtype.float32, fsdp=2), Loss.eager)
    finally:
        dist.destroy_process_group()
