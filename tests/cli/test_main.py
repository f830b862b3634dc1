"""`lowtide` without a command."""

import subprocess
import sys

import pytest

import lowtide
from lowtide.cli import main
from tests.support.commands import invoke


@pytest.mark.extended
def test_version():
    command = [sys.executable, "-X", "importtime", "-m", "lowtide", "--version"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout == f"lowtide {lowtide.__version__}\n"
    assert "lowtide.tools.bench.attention" in found.stderr
    assert "torch._dynamo" not in found.stderr  # it takes as long to import as torch does


def test_version_of_this_process():
    assert invoke("--version").stdout == f"lowtide {lowtide.__version__}\n"


def test_help_without_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lowtide"])
    with pytest.raises(SystemExit):
        main()
    found = capsys.readouterr()
    for command in ("bench", "doctor", "estimate", "profile", "train"):
        assert command in found.out + found.err
