"""The gallery has every script, with the output of a run; its table has the numbers of these outputs."""

import re

import pytest

from tests.docs.snippets import DOCS, ROOT

PAGE = (DOCS / "examples" / "index.md").read_text()
SCRIPTS = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if path.stem != "trl_common")


@pytest.mark.parametrize("name", SCRIPTS)
def test_gallery_entry(name):
    output = (DOCS / "examples" / "output" / f"{name}.txt").read_text()
    assert f"{{literalinclude}} output/{name}.txt" in PAGE
    assert f"{{literalinclude}} ../../examples/{name}.py" in PAGE
    before, after = re.findall(r"([\d.]+) MiB", output)
    assert re.search(rf"^\| `{name}\.py`.* \| {before} MiB \| {after} MiB \|$", PAGE, re.MULTILINE)
    assert float(after) < 0.6 * float(before)


def test_gallery_has_no_other_output():
    assert {path.stem for path in (DOCS / "examples" / "output").iterdir()} == set(SCRIPTS)
