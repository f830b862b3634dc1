"""The learned bias's examples run as their docstrings say: all scores' loss, less memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[4]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["relative_position_bias", "vision_transformer"])
def test_example_prints_same_loss_less_memory(name, plain_environment):
    run = subprocess.run(
        [sys.executable, f"examples/{name}.py"],
        cwd=ROOT,
        env=plain_environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert [line.split(":")[0].strip() for line in lines] == ["all scores", "lowtide"]
    patterns = (r"([\d.]+) at first", r"([\d.]+) at last", r"([\d.]+) MiB")
    (first, last, peak), (own_first, own_last, own_peak) = (
        [float(re.search(pattern, line)[1]) for pattern in patterns] for line in lines
    )
    printed = 1e-8
    assert abs(own_first - first) <= 8 * torch.finfo(torch.float32).eps * first + printed
    assert max(last, own_last) < first / 2, "both learn"
    assert own_peak < 0.6 * peak
    page = (ROOT / "docs" / "examples" / "index.md").read_text()
    told = re.search(rf"\| `{name}\.py` \| ([\d.]+) MiB \| ([\d.]+) MiB \|", page)
    assert [float(each) for each in told.groups()] == pytest.approx([peak, own_peak], rel=0.1)
