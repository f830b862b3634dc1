"""The examples for several ranks print one process's numbers, or eager torch's, as shown."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.support.ranks import ROOT, needs_gloo

NUMBER = re.compile(r"-?\d+\.\d+|\d+e-\d+|\d+")
pytestmark = needs_gloo


def told(name):
    """What the gallery shows."""
    return (ROOT / "docs" / "examples" / "output" / "distributed" / f"{name}.txt").read_text().splitlines()


def printed(name):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command.append(f"examples/distributed/{name}.py")
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def numbers(lines):
    """Of each line: its name, and the numbers that follow."""
    return {name: [*map(float, NUMBER.findall(rest))] for name, _, rest in (x.partition(":") for x in lines)}


@pytest.mark.extended
def test_each_way():
    found, shown = numbers(printed("each_way")), numbers(told("each_way"))
    assert list(found) == list(shown) == ["fsdp", "sharded", "tensor", "sequence", "grpo"]
    for name, (loss, expected, error) in found.items():
        assert abs(loss - expected) <= 2e-5, name
        assert error <= 2e-6, name
        assert loss == pytest.approx(shown[name][0], abs=2e-5)


@pytest.mark.extended
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_transformers():
    found, shown = numbers(printed("fsdp_transformers")), numbers(told("fsdp_transformers"))
    assert list(found) == list(shown) == ["eager", "deferred", "sharded"]
    *eager, peak = found["eager"]
    for name, (*losses, held) in found.items():
        assert losses == pytest.approx(eager, abs=2e-4)
        assert name == "eager" or held < peak
        assert held == pytest.approx(shown[name][-1], rel=0.1)
