"""The tables that stand in the pages' files are those that `make tables` writes."""

import os
import re
import subprocess
import sys

import pytest

from tests.docs.snippets import DOCS, ROOT

pytestmark = pytest.mark.extended  # making them takes seconds, in a process of its own


def test_tables_in_the_files_are_in_date():
    """Those that readers of the files see are what the site's directives make."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, DOCS / "_extensions" / "page_tables.py", "--check"],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_tables_out_of_date_are_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    pytest.importorskip("sphinx")
    import page_tables

    (tmp_path / "page.md").write_text("<!-- {ways-of-attention} -->\n\nold\n\n<!-- end -->\n")
    monkeypatch.setattr(page_tables, "DOCS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["page_tables.py", "--check"])
    with pytest.raises(SystemExit, match=r"make tables would change page\.md"):
        page_tables.main()
    monkeypatch.setattr(sys, "argv", ["page_tables.py"])
    page_tables.main()
    assert "| call | on the CPU | on CUDA |" in (tmp_path / "page.md").read_text()


def test_tables_of_performance_are_made_from_csvs(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    pytest.importorskip("sphinx")
    import page_tables

    for page in (DOCS / "performance").glob("*.md"):
        by_hand = page_tables.BLOCK.sub("", page.read_text())
        assert not re.search(r"^\|[ :|-]+\|$", by_hand, flags=re.MULTILINE), page
