"""Pictures of ratios over many cases: those of heads, and of public models' attention."""

import pytest

from lowtide.cli.bench.saved import draw_figure
from lowtide.tools.bench.attention.real_table import REAL_ROWS
from lowtide.tools.bench.heads.table import HEAD_ROWS
from lowtide.tools.bench.table import cells
from lowtide.tools.errors import UserError
from lowtide.tools.files import growing_table
from tests.support.drawings import drawn
from tests.tools.bench import test_heads
from tests.tools.bench.attention import test_real
from tests.tools.bench.test_draw import HERE

# Of each command: its form, its rows, the names on its axis, and words that its picture has.
HEADS = (
    *(HEAD_ROWS, test_heads.ROWS, [head.name for head in test_heads.PUBLIC]),
    {"lowtide", "lowtide-256MiB", "eager", "compile", "N = 256", "N = 4,096"},
)
ATTENTION = (
    *(REAL_ROWS, list(test_real.synthetic_rows()), [case.name for case in test_real.PUBLIC]),
    {"lowtide", "flex", "forward", "backward", "peak memory"},
)


@pytest.mark.parametrize(
    ("form", "rows", "names", "words"),
    [pytest.param(*HEADS, id="heads", marks=pytest.mark.extended), pytest.param(*ATTENTION, id="attention")],
)
def test_words_do_not_overlap(form, rows, names, words, tmp_path, monkeypatch):
    records = [cells(row, HERE, form) for row in rows]
    drawing = drawn(monkeypatch, lambda path: form.draw(records, path), tmp_path / "ratios.png")
    printed = [text for text, _ in drawing.words]
    assert {*names, *words} < set(printed)
    assert "sdpa-cudnn" not in printed, "all else is over it"
    upright = [(text, box) for text, box in drawing.words if text not in names]
    for place, (text, box) in enumerate(upright):
        assert not any(box.overlaps(other) for _, other in upright[:place]), text


@pytest.mark.parametrize(("form", "rows"), [HEADS[:2], ATTENTION[:2]], ids=["heads", "attention"])
def test_picture_of_nothing(form, rows):
    with pytest.raises(UserError, match="nothing to draw"):
        form.draw([cells(row, HERE, form) for row in rows if row.figures is None], None)


@pytest.mark.extended
@pytest.mark.parametrize(("form", "rows"), [HEADS[:2], ATTENTION[:2]], ids=["heads", "attention"])
def test_picture_of_the_file_is_that_of_the_rows(form, rows, tmp_path):
    """Card and versions are those of the file, wherever it is drawn."""
    records = [cells(row, HERE, form) for row in rows]
    with growing_table(tmp_path / "rows.csv", form.columns) as write:
        for record in records:
            write(record)
    draw_figure(tmp_path / "rows.csv", tmp_path / "file.svg")
    form.draw(records, tmp_path / "rows.svg")
    assert (tmp_path / "file.svg").read_bytes() == (tmp_path / "rows.svg").read_bytes()


def test_file_without_a_column(tmp_path):
    path = tmp_path / "heads.csv"
    path.write_text("head,provider\nGPT-2,lowtide\n")
    with pytest.raises(UserError, match="no column 'aligned_floor_ms': it is no CSV of heads"):
        draw_figure(path, tmp_path / "file.svg")
