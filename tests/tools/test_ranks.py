"""What a process of torchrun knows of itself, before any group: tests/distributed has real ones."""

import json

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lowtide.cli.shared.parameters import check_output
from lowtide.tools import ranks
from lowtide.tools.errors import UserError


@pytest.fixture
def third_of_four(monkeypatch):
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)


def test_process_alone():
    assert (ranks.launched(), ranks.world_size(), ranks.is_first()) == (False, 1, True)
    ranks.check_alone("--parallel")
    with ranks.joined("cpu"):
        assert ranks.from_first(lambda: 3) == 3


def test_process_of_torchrun(third_of_four):
    assert (ranks.launched(), ranks.world_size(), ranks.is_first()) == (True, 4, False)
    ranks.check_launched("--parallel", "train")
    with pytest.raises(UserError, match=r"torchrun has started 4 processes.*give --tp 4, or leave torchrun"):
        ranks.check_alone("--tp 4")


def test_first_rank_alone_tries_to_write(third_of_four, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    check_output(tmp_path / "file" / "below")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(Exception, match="cannot write there"):
        check_output(tmp_path / "file" / "below")


def test_more_processes_than_cards(third_of_four, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match="give --nproc-per-node=2, or --device cpu"), ranks.joined("cuda"):
        pass


def test_report_of_torchrun_has_the_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    ranks.tell_torchrun("lowtide train: --data x: there is no such file")
    report = str(ChildFailedError("lowtide", {0: ProcessFailure(0, 1, 1, str(tmp_path / "error.json"))}))
    assert "traceback : lowtide train: --data x: there is no such file\n" in report
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    ranks.tell_torchrun("as before")
    assert "as before" not in json.dumps([each.read_text() for each in tmp_path.iterdir()])
