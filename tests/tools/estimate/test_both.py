"""`lowtide estimate --fsdp --tp`: one rank's peak, held against what four processes hold."""

import json

import pytest
import torch.distributed as dist

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.report import print_table
from lowtide.tools.estimate.setting import Loss, Setting
from lowtide.tools.estimate.step import Result, estimate
from tests.support.ranks import RANKS
from tests.tools.estimate.compare import MARKS, compare
from tests.tools.estimate.conftest import TINY_LLAMA

pytest.importorskip("transformers")
pytestmark = MARKS

PLAIN = ["eager, {}, bfloat16, adamw, fsdp and tp", "lowtide, {}, bfloat16, adamw, fsdp and tp, workspace"]
OTHERS = [
    "eager, {}, autocast, sgd, fsdp and tp, checkpointing",
    "lowtide, {}, autocast, sgd, fsdp and tp, checkpointing, workspace",
]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changed", "kinds"),
    [
        ({}, PLAIN),
        ({}, OTHERS),
        ({"tie_word_embeddings": True}, PLAIN),
        ({"vocab_size": 8190}, PLAIN),
    ],
    ids=["plain", "other settings", "tied", "uneven"],
)
def test_estimate_matches_four_processes(tmp_path, changed, kinds):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY_LLAMA | changed))
    compare(tmp_path, [kind.format(path) for kind in kinds], ranks=RANKS * RANKS)


def test_divides_twice(config):
    """Optimizer states of all parameters are divided by both, which one alone does not."""
    path = config(TINY_LLAMA)
    both, fsdp = (
        estimate(Setting(path, 1, 64, fsdp=2, tp=tp), Loss.lowtide).held["optimizer"] for tp in (2, 1)
    )
    assert both == pytest.approx(fsdp / 2, rel=0.01)


def test_title(config, capsys):
    from rich.console import Console

    result = Result(estimate(Setting(config(TINY_LLAMA), 1, 64, fsdp=4, tp=2), Loss.lowtide))
    print_table(Console(width=200), [result])
    said = capsys.readouterr().out
    assert "on each of 4 x 2 ranks, FSDP2 x tensor-parallel" in said
    assert "divided over 8 ranks" in said


def test_shard_head_refused(config):
    with pytest.raises(UserError, match=r"--shard-head: .*is a DTensor already"):
        estimate(Setting(config(TINY_LLAMA), 1, 64, fsdp=2, tp=2, shard_head=True), Loss.lowtide)
    assert not dist.is_initialized()
