"""The command as a user runs it: real processes, real files, a real kill."""

import argparse
import csv
import inspect
import os
import struct
import subprocess
import sys
import time

import pytest
import torch

TINY = {
    "--vocab-size": 512,
    "--width": 64,
    "--depth": 1,
    "--context": 32,
    "--batch": 4,
    "--device": "cpu",
}


@pytest.fixture
def lowtide_train(tmp_path):
    """Start `lowtide train` in an empty directory, with a cache of its own and a text."""
    (tmp_path / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    environment = os.environ | {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONWARNINGS": "error",
        "OMP_NUM_THREADS": "1",
    }

    tiny = [str(part) for option in TINY.items() for part in option]

    def start(*arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "lowtide", "train", *tiny, *arguments],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    output, errors = process.communicate(timeout=120)
    return process.returncode, output, errors


def losses(directory) -> list[float]:
    with open(directory / "log.csv", newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def test_both_ends_with_samples_a_table_and_a_figure(lowtide_train, tmp_path):
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


def test_a_killed_run_loses_at_most_one_interval(lowtide_train, tmp_path):
    arguments = ["--data", "text.txt", "--steps", "300", "--save-every", "10"]
    whole = lowtide_train(*arguments, "--out", "whole")
    killed = lowtide_train(*arguments, "--out", "killed")
    for line in killed.stdout:
        if "step 30 " in line:
            break
    killed.kill()
    killed.communicate()
    checkpoint = tmp_path / "killed/lowtide/checkpoint.pt"
    reached = len(torch.load(checkpoint)["history"])
    assert 30 <= reached < 300
    assert reached % 10 == 0

    assert finish(whole)[0] == 0
    code, output, errors = finish(lowtide_train(*arguments, "--out", "killed"))
    assert (code, errors) == (0, "")
    assert "step 30 " not in output
    assert f"step {reached + 10} " in output
    assert losses(tmp_path / "killed/lowtide") == losses(tmp_path / "whole/lowtide")

    before = checkpoint.read_bytes()
    code, _, errors = finish(lowtide_train(*arguments, "--out", "killed", "--tied"))
    assert code == 1
    assert "tied False, not True" in errors
    assert checkpoint.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--data nowhere", 1, "--data nowhere: there is no such file or directory"),
        ("--data empty.txt", 1, "--data empty.txt: there is no text in it"),
        ("--data image.bin --loss both", 1, "image.bin is not UTF-8 text"),
        ("--data text.txt --vocab-size 60000", 1, "the text allows a vocabulary of"),
        ("--data text.txt --loss dense", 2, "'dense' is not one of"),
        pytest.param(
            "--data text.txt --device cuda",
            1,
            "torch sees no CUDA device here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA"),
        ),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(lowtide_train, tmp_path, arguments, code, said):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "image.bin").write_bytes(b"\x89PNG\x00\xff")
    returned, _, errors = finish(lowtide_train(*arguments.split()))
    assert returned == code
    assert said in errors
    assert "Traceback" not in errors
    if code == 1:
        assert errors.startswith("lowtide train: ")
        assert errors.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_both_refuse_another_run_before_either_trains(lowtide_train, tmp_path):
    code, _, errors = finish(lowtide_train("--loss", "eager", "--steps", "4", "--out", "there"))
    assert code == 0, errors
    code, _, errors = finish(lowtide_train("--loss", "both", "--steps", "2", "--out", "there"))
    assert code == 1
    assert "already at step 4" in errors
    assert not (tmp_path / "there/lowtide").exists()


def test_a_killed_comparison_takes_its_child_along(lowtide_train, tmp_path):
    process = lowtide_train("--loss", "both", "--steps", "100000", "--save-every", "1", "--out", "killed")
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
