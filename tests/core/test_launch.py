"""Launches that are remembered, beside those of Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from lowtide.core.backend import cdiv, next_power_of_2

ODD_POINTERS, UNKNOWN_TYPES = 2, 1  # of the 21 cases, each with two sets of constants


def test_same_kernels_and_values_as_triton():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.core.launches_without_a_card"],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    *launches, last = (json.loads(line) for line in run.stdout.splitlines())
    assert len(launches) == 84
    assert not [each["arguments"] for each in launches if not each["same"]]
    # The second time, addresses stand for tensors wherever the launch was remembered.
    through_triton = sum(each["tensors"] for each in launches[42:])
    assert through_triton == 2 * (ODD_POINTERS + UNKNOWN_TYPES)
    assert last["known"] <= 42 - through_triton


def test_sizes_as_of_triton():
    import triton

    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert cdiv(number, 7) == triton.cdiv(number, 7)
    assert cdiv(0, 7) == 0
