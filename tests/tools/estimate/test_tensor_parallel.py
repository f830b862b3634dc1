"""`lowtide estimate --tp`: one rank's peak without others, against what two processes hold."""

import json

import pytest
import torch.distributed as dist
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.step import estimate
from tests.support.ranks import run_ranks
from tests.tools.estimate.compare import MARKS, compare
from tests.tools.estimate.conftest import TINY_GPT2, TINY_LLAMA
from tests.tools.estimate.training_ranks import parsed, seeded

pytest.importorskip("transformers")
pytestmark = MARKS

LLAMA = [
    *("eager, {}, bfloat16, adamw, tp", "lowtide, {}, bfloat16, adamw, tp, workspace"),
    "lowtide, {}, bfloat16, adamw, tp, 4 sequences",
    "eager, {}, autocast, sgd, tp, checkpointing",
    "lowtide, {}, autocast, sgd, tp, checkpointing, workspace",
]
BY_TRANSFORMERS = [
    "eager, {}, bfloat16, adamw, tp, by transformers",
    "lowtide, {}, bfloat16, adamw, tp, workspace, by transformers",
]


# Each is a model that both processes train.
@pytest.mark.parametrize(
    "kinds",
    [
        LLAMA[:2],
        pytest.param(LLAMA[2:], marks=pytest.mark.extended),
        pytest.param(BY_TRANSFORMERS, marks=pytest.mark.extended),
    ],
    ids=["plain", "other settings", "by transformers"],
)
def test_estimate_matches_two_processes(tmp_path, config, kinds):
    path = config(TINY_LLAMA)
    compare(tmp_path, [kind.format(path) for kind in kinds])


@pytest.mark.extended
@pytest.mark.parametrize(
    "changed",
    [{"vocab_size": 8191}, {"tie_word_embeddings": True}],
    ids=["uneven", "tied"],
)
def test_estimate_of_other_heads_matches_two_processes(tmp_path, changed):
    path = tmp_path / "other.json"
    path.write_text(json.dumps(TINY_LLAMA | changed))
    compare(tmp_path, [f"{loss}, {path}, bfloat16, adamw, tp, workspace" for loss in Loss.__members__])


def test_divided_model_has_the_loss_of_the_whole(tmp_path, config):
    path = config(TINY_LLAMA)
    kinds = [f"{loss}, {path}, float32, adamw, tp, first loss" for loss in Loss.__members__]
    ranks = run_ranks("tests.tools.estimate.training_ranks", tmp_path / "store", kinds)
    model, tokens_BT = seeded(parsed(kinds[0])[0])
    expected = pytest.approx(model.loss(tokens_BT).item(), rel=1e-5)
    assert [rank[kind].get("loss", rank[kind]) for rank in ranks for kind in kinds] == [expected] * 4


def held(path, ranks, **options):
    return estimate(Setting(path, 1, 64, tp=ranks, **options), Loss.lowtide).held


@pytest.mark.extended
def test_ranks_divide_what_they_hold(config):
    """All matrices by the number of ranks, and their states; a tied weight is held once."""
    path = config(TINY_LLAMA | {"num_key_value_heads": 4})
    two, four = held(path, 2), held(path, 4)
    for category in ("weights", "optimizer"):
        assert four[category] == pytest.approx(two[category] / 2, rel=0.02)
    tied = held(config(TINY_LLAMA, tie_word_embeddings=True), 2)
    assert two["weights"] - tied["weights"] == pytest.approx(8192 // 2 * 64 * 2, rel=0.05)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_left_behind(monkeypatch, config, fails):
    before = ShardingPropagator._propagate_tensor_meta_non_cached
    path = config(TINY_LLAMA)
    if fails:
        monkeypatch.setattr("lowtide.tools.estimate.step.run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            held(path, 2)
    else:
        held(path, 2)
    assert not dist.is_initialized()
    assert ShardingPropagator._propagate_tensor_meta_non_cached is before


def test_refused(config, monkeypatch, tmp_path):
    path = config(TINY_LLAMA)
    with pytest.raises(UserError, match="--tp 4 cannot divide 2 key-value heads evenly"):
        held(path, 4)
    with pytest.raises(UserError, match="Adafactor cannot step divided parameters"):
        held(path, 2, optimizer=Optimizer.adafactor)
    with pytest.raises(UserError, match="needs a model of transformers with a tp_plan"):
        held("demo-cpu", 2, dtype=Dtype.float32)
    with pytest.raises(UserError, match="needs a model of transformers with a tp_plan"):
        held(config(TINY_GPT2), 2)
    experts = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 32}
    with pytest.raises(UserError, match=r"--tp knows no .*moe_tp_experts.* of the model's tp_plan"):
        held(config(TINY_LLAMA | experts), 2)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match="--tp: this process is a rank of a process group already"):
            held(path, 2)
    finally:
        dist.destroy_process_group()
