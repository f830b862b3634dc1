"""A first call compiles ahead exactly the kernels that it then launches, in every engine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tests.ops.linear_cross_entropy.engines.rehearsals_without_a_card import CALLS


@pytest.fixture(scope="module")
def results():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.linear_cross_entropy.engines.rehearsals_without_a_card"],
        env=environment,
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    every = [json.loads(line) for line in run.stdout.splitlines()]
    return {(each["name"], each["pipelined"]): each for each in every}


@pytest.mark.parametrize("pipelined", [False, True], ids=["Triton", "Gluon"])
@pytest.mark.parametrize("name", [*CALLS, "log-probabilities"])
def test_every_launch_is_rehearsed(results, name, pipelined):
    result = results[name, pipelined]
    forward, backward = _kinds(result["forward"]), _kinds(result["backward"])
    rehearsed = [_kinds(each) for each in result["rehearsed"]]
    assert len(forward) >= 2
    assert len(backward) > 0 or name == "no gradients"
    if name == "log-probabilities":
        # A rehearsal of forward does not know that entropies have a gradient too.
        assert rehearsed[0] >= forward
        assert rehearsed[0] | rehearsed[1] >= backward > rehearsed[0] & backward > set()
    else:
        assert rehearsed == [forward | backward]
    assert not result["draws"]
    assert result["imported"] == []


def test_each_engine_is_rehearsed(results):
    kernels = {kernel for result in results.values() for each in result["rehearsed"] for kernel, _ in each}
    assert kernels >= {
        "exponentials_kernel", "_add_product_kernel", "_add_product_pipelined_kernel", "_distances_kernel",
        "_distance_pipeline_kernel", "_softmax_gradient_kernel", "_input_gradient_product_kernel",
        "_recomputed_product_kernel", "_log_probs_kernel", "_scale_kernel",
    }  # fmt: skip


def _kinds(launches):
    return {tuple(each) for each in launches}
