"""The gallery has every script, with a run's output; its table has the numbers of the outputs."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.snippets import DOCS, ROOT

PAGE = (DOCS / "examples" / "index.md").read_text()
OUTPUT = DOCS / "examples" / "output"


def names(folder, ending):
    """The files of a folder and those below, without the ending."""
    files = [path for path in folder.rglob(f"*{ending}") if path.is_file()]
    return {path.relative_to(folder).with_suffix("").as_posix() for path in files}


SCRIPTS = sorted(names(ROOT / "examples", ".py") - {"trl_common"})
WITHOUT_PEAKS = {"distributed/each_way"}  # it compares numbers alone


@pytest.mark.parametrize("name", SCRIPTS)
def test_gallery_entry(name):
    assert f"{{literalinclude}} output/{name}.txt" in PAGE
    assert f"{{literalinclude}} ../../examples/{name}.py" in PAGE


@pytest.mark.parametrize("name", sorted({*SCRIPTS} - WITHOUT_PEAKS))
def test_gallery_table(name):
    before, after, *_ = re.findall(r"([\d.]+) MiB", (OUTPUT / f"{name}.txt").read_text())
    row = rf"^\| `{name}\.py`.* \| {before} MiB \| {after} MiB \|$"
    assert re.search(row, PAGE, re.MULTILINE)
    assert float(after) < 0.6 * float(before)


def test_gallery_has_no_other_output():
    assert names(OUTPUT, ".txt") == names(OUTPUT, "") == {*SCRIPTS}


@pytest.mark.extended
def test_chunked_loss_script_prints_its_output(plain_environment):
    """Other tests run the others."""
    done = subprocess.run(
        [sys.executable, "examples/chunked_loss.py"],
        cwd=ROOT,
        env=plain_environment | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = (DOCS / "examples" / "output" / "chunked_loss.txt").read_text()
    for pattern, tolerance in ((r"loss ([\d.]+)", 1e-4), (r"([\d.]+) MiB", 0.1)):
        mine, theirs = ([float(each) for each in re.findall(pattern, text)] for text in (done.stdout, told))
        assert mine == pytest.approx(theirs, rel=tolerance)
