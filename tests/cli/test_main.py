"""`lowtide` without a command."""

import subprocess
import sys

import lowtide


def run(*arguments):
    return subprocess.run([sys.executable, "-m", "lowtide", *arguments], capture_output=True, text=True)


def test_version():
    found = run("--version")
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"lowtide {lowtide.__version__}\n"


def test_alone_it_shows_its_commands():
    found = run()
    for command in ("bench", "doctor", "estimate", "profile", "train"):
        assert command in found.stdout + found.stderr
