"""The notebooks run from their first cell to the last, and their results are kept in them."""

import sys

import pytest

from tests.docs.snippets import DOCS, ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("transformers")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.extended
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, monkeypatch, tmp_path):
    """A cell that fails, or an assertion in it, is an error."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.chdir(tmp_path)
    book = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(book, timeout=240, kernel_name="python3")
    client.create_kernel_manager().kernel_spec.argv[0] = sys.executable
    client.execute()
    assert any("assert" in cell.source for cell in book.cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_its_results(path):
    book = nbformat.read(path, as_version=4)
    outputs = [output for cell in book.cells for output in cell.get("outputs", ())]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]


def test_notebooks_are_two():
    assert [path.stem for path in NOTEBOOKS] == ["estimate_and_measure", "one_line"]
