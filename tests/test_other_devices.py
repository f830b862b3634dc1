"""Devices beside the CPU and CUDA: runs other_devices.py in a process of its own.

Autograd counts the kinds of devices when it first runs, and the simulated one must be among them.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("other_devices.py")


@pytest.mark.parametrize(
    ("marks", "fewest"), [("not extended", 60), pytest.param("extended", 60, marks=pytest.mark.extended)]
)
def test_in_a_process(marks, fewest):
    """At least so many cases pass, and none fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
        str(CASES),
    ]
    done = subprocess.run(command, cwd=CASES.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= fewest
