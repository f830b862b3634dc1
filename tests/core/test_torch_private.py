"""A private function of torch that a release lacks: the slower way, with the same results."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowtide.core import torch_private
from tests.support.extended import asked
from tests.support.graphs import needs_tracing

NAMES = re.findall(r'_find\("([\w.]+)"\)', Path(torch_private.__file__).read_text())


def run(*missing):
    """Return what went wrong in a process where these names are missing, by names."""
    command = [sys.executable, "-m", "tests.core.missing_names", *missing]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {found["names"]: found["error"] for found in map(json.loads, done.stdout.splitlines())}


def test_names_are_looked_up():
    assert len(NAMES) == 24
    assert all(torch_private._find(name) is not None for name in NAMES)
    assert torch_private._find("_C._functorch.no_such_function") is None
    assert torch_private._find("no_such_module.function") is None


@needs_tracing  # without it lowtide imports torch.compile, which needs these names itself
def test_all_are_missing():
    everything = ",".join(NAMES)
    assert run(everything) == {everything: None}


@pytest.fixture(scope="module")
def errors(request):
    """Return what went wrong without each name that a test asks for."""
    return run(*asked(request, "name", NAMES))


@pytest.mark.extended
@pytest.mark.parametrize("name", NAMES)
def test_one_is_missing(name, errors):
    assert errors[name] is None, errors[name]


def test_no_other_private_name_in_the_operators():
    """Those of functorch that only a wrapped tensor needs come after `is_wrapped`, which knows."""
    root = Path(torch_private.__file__).parents[1]
    known = {"get_unwrapped", "maybe_get_bdim"}
    for folder in ("core", "ops"):
        for path in (root / folder).rglob("*.py"):
            if path.name != "torch_private.py":
                found = set(re.findall(r"\btorch\._C\.(?:\w+\.)*(\w+)", path.read_text()))
                assert found <= known, path


def test_graphs_break_where_torch_traces_no_properties(monkeypatch):
    """The call runs eagerly, once for each run of the graph."""
    monkeypatch.setattr(torch_private, "TRACES_PROPERTIES", False)
    eager = []

    @torch_private.breaks_old_graphs
    def call(x):
        eager.append(not torch.compiler.is_compiling())
        return x.exp()

    def step(x):
        return 2 * call(x + 1)

    x = torch.randn(3)
    torch.testing.assert_close(torch.compile(step, backend="eager")(x), 2 * (x + 1).exp())
    assert eager == [True]
    torch.compiler.reset()
    with pytest.raises(Exception, match=torch_private.UNTRACED):
        torch.compile(step, backend="eager", fullgraph=True)(x)
    monkeypatch.setattr(torch_private, "TRACES_PROPERTIES", True)
    assert torch_private.breaks_old_graphs(step) is step
