"""`lowtide train --parallel` under torchrun, in real processes: the losses of one process."""

import argparse
import inspect
import os
import re
import struct
import subprocess
import sys

import pytest
import torch

from lowtide.cli.train import FIGURE
from tests.support.cards import on_cards
from tests.support.commands import rows_of
from tests.support.extended import all_extended_but
from tests.support.ranks import ROOT, needs_gloo, torchrun

pytestmark = needs_gloo
TINY = "--data text.txt --out out --vocab-size 512 --width 64 --depth 1 --context 32 --batch 4"


@pytest.fixture(autouse=True)
def _text(tmp_path):
    (tmp_path / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")


def train(directory, *arguments, device="cpu", ranks=2):
    return torchrun(directory, "train", "--device", device, *TINY.split(), *arguments, ranks=ranks)


def losses(directory):
    return [float(row["loss"]) for row in rows_of(directory / "log.csv")]


@pytest.mark.parametrize("parallel", all_extended_but(["shard_head"], ["data", "tensor", "shard_head"]))
def test_losses_are_one_process(tmp_path, parallel):
    pytest.importorskip("matplotlib")  # a comparison ends in a figure
    done = train(tmp_path, "--parallel", parallel, "--steps", "20")
    assert done.returncode == 0, done.stderr
    ranks, one = losses(tmp_path / f"out/{parallel}-2"), losses(tmp_path / "out/lowtide")
    assert len(ranks) == len(one) == 20
    assert max(abs(a - b) for a, b in zip(ranks, one)) <= 1e-5
    assert one[0] - one[-1] > 0.5
    table = done.stdout[done.stdout.index("final loss") :]
    rows = [line.replace("│", " ").split() for line in table.splitlines() if "│" in line]
    assert rows[0][:4] == ["2", "ranks", f"{ranks[-1]:.6f}", rows[0][3]]
    assert rows[1][:3] == ["one", "process", f"{one[-1]:.6f}"]
    assert abs(float(rows[0][3]) - float(rows[1][3])) <= 1e-5  # the validation
    assert done.stdout.count(f"{parallel} on 2 ranks  step 20  ") == 1, "rank 0 alone prints"
    assert done.stdout.count("sample after 20 steps of") == 2
    figure = (tmp_path / "out" / FIGURE).read_bytes()
    assert struct.unpack(">II", figure[16:24]) == (1600, 672)

    # The checkpoint holds all of the model and the optimizer. Averages of gradients show a wrong
    # scale, which Adam's steps hide.
    saved, alone = (torch.load(tmp_path / f"out/{run}/checkpoint.pt") for run in (f"{parallel}-2", "lowtide"))
    assert saved["model"].keys() == alone["model"].keys()
    for place, (name, weight) in enumerate(alone["model"].items()):
        torch.testing.assert_close(saved["model"][name], weight, rtol=0, atol=1e-4)
        found, expected = saved["optimizer"]["state"][name], alone["optimizer"]["state"][place]
        for average in ("exp_avg", "exp_avg_sq"):
            error = (found[average] - expected[average]).abs().max() / expected[average].abs().max()
            assert error <= 1e-4, (name, average)


@pytest.mark.parametrize("device", [on_cards(2)])
@pytest.mark.parametrize("parallel", ["data", "tensor", "shard_head"])
def test_losses_on_cards(tmp_path, device, parallel):
    """Autocast rounds the products of a rank and those of one process differently. The losses of
    the ranks must be as close to those of one process as the losses of an eager run are."""
    done = train(tmp_path, "--parallel", parallel, "--steps", "20", device=device)
    assert done.returncode == 0, done.stderr
    eager = train(tmp_path, "--loss", "eager", "--steps", "20", device=device, ranks=1)
    assert eager.returncode == 0, eager.stderr
    found, one, other = (losses(tmp_path / "out" / run) for run in (f"{parallel}-2", "lowtide", "eager"))
    assert len(found) == len(one) == len(other) == 20
    allowed = 2 * max(abs(a - b) for a, b in zip(other, one))
    assert max(abs(a - b) for a, b in zip(found, one)) <= allowed
    assert one[0] - one[-1] > 0.5


@pytest.mark.extended
@pytest.mark.parametrize("options", ["data --tied", "tensor"])
def test_resumed_run_is_the_whole_one(tmp_path, options):
    pytest.importorskip("matplotlib")  # as above
    arguments = ["--parallel", *options.split(), "--save-every", "6"]
    for steps in ("6", "12"):
        done = train(tmp_path, *arguments, "--steps", steps)
        assert done.returncode == 0, done.stderr
    assert "step 6 " not in done.stdout
    ranks, one = losses(tmp_path / f"out/{options.split()[0]}-2"), losses(tmp_path / "out/lowtide")
    assert len(ranks) == 12
    assert max(abs(a - b) for a, b in zip(ranks, one)) <= 1e-5


@pytest.mark.extended
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--parallel data --batch 5", "--batch must be a multiple of the 2 ranks"),
        (
            "--steps 2",
            "torchrun has started 2 processes, which would each do the same: give --parallel, one of data",
        ),
    ],
)
def test_errors_are_told_once(tmp_path, arguments, said):
    """An error is told in one line, and in torchrun's final report; torchrun starts the ranks."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "-m", "lowtide", "train", "--device", "cpu", *TINY.split(), *arguments.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert len(re.findall(rf"^lowtide train: .*{said}", done.stderr, re.MULTILINE)) == 1
    assert len(re.findall(rf"^ *traceback *: lowtide train: .*{said}", done.stderr, re.MULTILINE)) == 1
    assert done.stderr.count("lowtide train: ") == done.stderr.count(said) == 2
    assert "lowtide/cli" not in done.stderr, "no traceback but torchrun's own"
    assert not (tmp_path / "out").exists()
