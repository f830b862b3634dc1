"""The command as a user runs it: real processes, real files, a real kill."""

import argparse
import inspect
import os
import struct
import subprocess
import sys
import time

import pytest
import torch

from tests.support.commands import invoke as in_this_process
from tests.support.commands import rows_of

TINY = {
    "--vocab-size": 512,
    "--width": 64,
    "--depth": 1,
    "--context": 32,
    "--batch": 4,
    "--device": "cpu",
}


ARGUMENTS = [str(part) for option in TINY.items() for part in option]


@pytest.fixture(autouse=True)
def _text(tmp_path, monkeypatch):
    """An otherwise empty directory to work in, with a text and a cache of its own."""
    (tmp_path / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    monkeypatch.setenv("PYTHONWARNINGS", "error")


def lowtide_train(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "lowtide", "train", *ARGUMENTS, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def invoke(*arguments: str):
    """In this process, where nothing is asked of the process itself."""
    return in_this_process("train", *ARGUMENTS, *arguments)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def losses(directory) -> list[float]:
    return [float(row["loss"]) for row in rows_of(directory / "log.csv")]


@pytest.mark.extended
def test_both_losses_table_and_figure(tmp_path):
    code, output, errors = finish(
        lowtide_train("--loss", "both", "--data", "text.txt", "--steps", "30", "--save-every", "20")
    )
    assert (code, errors) == (0, "")
    ours, eager = losses(tmp_path / "runs/train/lowtide"), losses(tmp_path / "runs/train/eager")
    assert len(ours) == 30
    assert max(abs(a - b) for a, b in zip(ours, eager)) < 1e-4
    assert ours[-1] < ours[0] - 0.5

    for loss in ("lowtide", "eager"):
        assert f"{loss}  step 20  loss " in output
        assert f"sample after 30 steps of {loss}" in output
    table = output[output.index("final loss") :]
    assert f"{ours[-1]:.6f}" in table
    assert f"{eager[-1]:.6f}" in table
    assert f"{abs(ours[-1] - eager[-1]):.1e}" in table
    figure = (tmp_path / "runs/train/comparison.png").read_bytes()
    assert figure[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", figure[16:24]) == (1600, 672)


@pytest.mark.extended
def test_killed_run_resumes(tmp_path):
    arguments = ["--data", "text.txt", "--save-every", "10"]
    killed = lowtide_train(*arguments, "--steps", "300", "--out", "killed")
    for line in killed.stdout:
        if "step 30 " in line:
            break
    killed.kill()
    killed.communicate()
    checkpoint = tmp_path / "killed/lowtide/checkpoint.pt"
    reached = len(torch.load(checkpoint)["history"])
    assert 30 <= reached < 300
    assert reached % 10 == 0

    arguments += ["--steps", str(reached + 20)]
    whole = invoke(*arguments, "--out", "whole")
    assert whole.exit_code == 0, whole.output
    code, output, errors = finish(lowtide_train(*arguments, "--out", "killed"))
    assert (code, errors) == (0, "")
    assert "step 30 " not in output
    assert f"step {reached + 10} " in output
    assert losses(tmp_path / "killed/lowtide") == losses(tmp_path / "whole/lowtide")

    before = checkpoint.read_bytes()
    refused = invoke(*arguments, "--out", "killed", "--tied")
    assert refused.exit_code == 1
    assert "tied False, not True" in refused.output
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--data nowhere", 1, "--data nowhere: there is no such file or directory"),
        ("--data empty.txt", 1, "--data empty.txt: there is no text in it"),
        ("--data image.bin --loss both", 1, "image.bin is not UTF-8 text"),
        ("--data text.txt --vocab-size 60000", 1, "the text allows a vocabulary of"),
        ("--data text.txt --loss dense", 2, "'dense' is not one of"),
        (
            "--parallel data",
            1,
            "--parallel needs the ranks of torchrun: torchrun --nproc-per-node=2 -m lowtide",
        ),
        ("--parallel pipeline", 2, "'pipeline' is not one of"),
        pytest.param(
            "--data text.txt --device cuda",
            1,
            "torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_input_refused(tmp_path, arguments, code, said):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\x00\xff")
    done = invoke(*arguments.split())
    assert done.exit_code == code
    assert said in done.output
    assert isinstance(done.exception, SystemExit), "no traceback"
    if code == 1:
        assert done.output.startswith("lowtide train: ")
        assert done.output.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_errors_on_standard_error():
    said = "lowtide train: --data nowhere: there is no such file or directory\n"
    assert finish(lowtide_train("--data", "nowhere")) == (1, "", said)


def test_both_losses_refuse_other_run_first(tmp_path):
    text = ("--data", "text.txt", "--out", "there")
    done = invoke(*text, "--loss", "eager", "--steps", "4")
    assert done.exit_code == 0, done.output
    done = invoke(*text, "--loss", "both", "--steps", "2")
    assert done.exit_code == 1
    assert "already at step 4" in done.output
    assert not (tmp_path / "there/lowtide").exists()


@pytest.mark.extended
def test_killed_comparison_ends_child(tmp_path):
    endless = ("--data", "text.txt", "--steps", "100000", "--save-every", "1")
    process = lowtide_train(*endless, "--loss", "both", "--out", "killed")
    log = tmp_path / "killed/lowtide/log.csv"
    wait_until(log.exists)
    process.kill()
    process.communicate()  # returns when the child, too, has let go of the pipe
    after = log.read_bytes()
    time.sleep(0.5)
    assert log.read_bytes() == after


def wait_until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)
