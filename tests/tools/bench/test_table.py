import io
import subprocess

import pytest
import torch
from rich.console import Console

import lowtide
from lowtide.tools import environment, files
from lowtide.tools.bench import table
from lowtide.tools.bench.cases import LossCase, Mode
from lowtide.tools.bench.measure import Figures, Row
from lowtide.tools.bench.providers import Provider
from tests.support.commands import rows_of

CASE = LossCase("tiny", 96, 16, 80, torch.bfloat16, "cpu")
FAST, PEER, BAD = (
    Provider(name, distribution, lambda case: None)
    for name, distribution in (("fast", "torch"), ("peer", "no-such-peer"), ("bad", "torch"))
)
RAN = Row(CASE, Mode.STEP, FAST, Figures(12.0, 11.5, 13.0, 10.0, 1.2, 3 * 2**20, (1e-7, 2e-3, 3e-3)))
ABSENT = Row(CASE, Mode.STEP, PEER, None, "not installed: [peer]")
BROKEN = Row(CASE, Mode.STEP, BAD, None, "RuntimeError: x", failed=True)


def test_csv_columns_and_environment(tmp_path):
    here = environment.Environment.of("cpu")
    with files.growing_table(tmp_path / "rows.csv", table.LOSS.columns) as write:
        for row in (RAN, ABSENT, BROKEN):
            write(table.cells(row, here, table.LOSS))
    ran, absent, broken = rows_of(tmp_path / "rows.csv")
    assert tuple(ran) == table.COLUMNS
    assert ran["torch"] == torch.__version__
    assert ran["lowtide"]
    assert ran["card"].endswith(" 1 thread")
    assert (ran["case"], ran["dtype"], ran["mode"], ran["provider"]) == ("tiny", "bfloat16", "step", "fast")
    assert [int(ran[name]) for name in ("tokens", "features", "classes")] == [96, 16, 80]
    assert [float(ran[name]) for name in table.TIMES] == [12.0, 11.5, 13.0, 10.0, 1.2]
    assert int(ran["peak_bytes"]) == 3 * 2**20
    assert [float(ran[name]) for name in table.ERRORS] == [1e-7, 2e-3, 3e-3]
    assert [ran[name] for name in ("workspace", *table.PLAIN)] == ["", "", ""]
    assert (ran["logits"], ran["largest_logit"]) == ("random", "")
    assert (ran["version"], absent["version"]) == (torch.__version__, "")
    assert [row["status"] for row in (ran, absent, broken)] == ["ok", "unavailable", "failed"]
    assert (absent["reason"], absent["ms"], absent["loss_error"]) == ("not installed: [peer]", "", "")


def test_table_figures_and_reasons():
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.render([RAN, ABSENT, BROKEN]))
    text = console.export_text()
    assert "tiny: 96 x 16 x 80 bfloat16 on cpu, step" in text
    (line,) = (line for line in text.splitlines() if "fast" in line)
    assert line.split() == ["fast", "12.00", "11.50-13.00", "10.00", "1.20", "3.0", "1e-07", "2e-03", "3e-03"]
    assert "peer unavailable: not installed: [peer]" in text
    assert "bad failed: RuntimeError: x" in text


def test_table_of_options():
    option = Provider("softcap", "torch", lambda case: None, workspace=2**30)
    figures = Figures(12.0, 11.5, 13.0, 10.0, 1.2, 3 * 2**20, (), plain_ms=12.5, over_plain=-0.04)
    row = Row(CASE, Mode.STEP, option, figures)
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table.render([row, BROKEN]))
    text = console.export_text()
    (line,) = (line for line in text.splitlines() if "softcap" in line)
    assert line.split() == ["softcap", "12.00", "11.50-13.00", "10.00", "1.20", "3.0", "12.50", "-4.0", "%"]
    assert "over plain" in text
    assert "err" not in text.replace("RuntimeError", "")
    record = table.record(row)
    assert [record[name] for name in ("workspace", *table.PLAIN)] == [2**30, "12.5", "-0.04"]
    assert not record.keys() & set(table.ERRORS)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A package at tmp_path/lowtide that lowtide seems to come from, and git for tmp_path."""
    package = tmp_path / "lowtide"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(lowtide, "__file__", str(package / "__init__.py"))
    for variable in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(variable, raising=False)

    def git(*arguments):
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.com", "-c", "core.hooksPath=/dev/null")
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)
        return done.stdout.decode().strip()

    git("init", "--quiet")
    return git


def test_commit_of_checkout(checkout, tmp_path):
    checkout("add", "lowtide")
    checkout("commit", "--quiet", "--message=one")
    commit = checkout("rev-parse", "HEAD")[:12]
    assert environment.commit() == commit
    (tmp_path / "lowtide" / "__init__.py").write_text("changed = True\n")
    assert environment.commit() == f"{commit}-dirty"


def test_commit_dirty_by_python_files_alone(checkout, tmp_path):
    for name in ("README.md", "setup.py", "lowtide/notes.txt", "lowtide/tools/bench/measure.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    checkout("add", ".")
    checkout("commit", "--quiet", "--message=one")
    commit = checkout("rev-parse", "HEAD")[:12]
    for name in ("README.md", "setup.py", "lowtide/notes.txt", "step.csv", "tests.py", "lowtide/step.csv"):
        (tmp_path / name).write_text("changed\n")
    assert environment.commit() == commit
    (tmp_path / "lowtide" / "tools" / "bench" / "new.py").touch()
    assert environment.commit() == f"{commit}-dirty"
    (tmp_path / "lowtide" / "tools" / "bench" / "new.py").unlink()
    assert environment.commit() == commit
    (tmp_path / "lowtide" / "tools" / "bench" / "measure.py").unlink()
    assert environment.commit() == f"{commit}-dirty"


def test_commit_of_package_below_other_checkout(checkout):
    checkout("commit", "--quiet", "--allow-empty", "--message=one")
    assert environment.commit() == ""
    assert environment.version("lowtide")
