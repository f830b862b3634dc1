"""Devices beside the CPU and CUDA: runs other_devices.py in a process of its own.

Autograd counts the kinds of devices when it first runs, and the simulated one must be among them.
"""

import re
from pathlib import Path

import pytest

from tests.support.ranks import start_program

CASES = Path(__file__).with_name("other_devices.py")
OPTIONS = ("-q", "-p", "pytest_timeout", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("marks", "fewest"), [("not extended", 60), pytest.param("extended", 60, marks=pytest.mark.extended)]
)
def test_in_a_process(tmp_path, plain_environment, marks, fewest):
    """At least so many cases pass, and none fails."""
    arguments = [*OPTIONS, "-m", marks, "--rootdir", str(CASES.parents[1]), str(CASES)]
    program = f"import sys, pytest; sys.exit(pytest.main({arguments}))"
    # The server has imported Triton without its interpreter, and other plugins' modules, which
    # pytest would warn of.
    environment = plain_environment | {"TRITON_INTERPRET": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    status, said, errors = start_program(tmp_path, program, environment)()
    assert status == 0, said[-4000:] + errors[-1000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None
    assert int(passed[1]) >= fewest
