"""The examples for several ranks run as their docstrings say: one process's numbers, or eager torch's."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs torch.distributed with gloo"
)


def printed(example):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", example]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.extended
def test_each_way():
    found = printed("examples/distributed/each_way.py")
    assert [line.partition(":")[0] for line in found] == ["fsdp", "sharded", "tensor", "sequence", "grpo"]
    for line in found:
        loss, expected, error = map(float, re.findall(r"-?\d+\.\d+|\d+e-\d+", line))
        assert abs(loss - expected) <= 2e-5, line
        assert error <= 2e-6, line


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers():
    found = {}
    for line in printed("examples/distributed/fsdp_transformers.py"):
        name, _, numbers = line.partition(":")
        *losses, peak = map(float, re.findall(r"\d+\.?\d*", numbers))
        found[name] = losses, peak
    eager, peak = found.pop("eager")
    assert found.keys() == {"deferred", "sharded"}
    for losses, less in found.values():
        assert losses == pytest.approx(eager, abs=2e-4)
        assert less < peak
