import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from lowtide.tools.errors import UserError
from lowtide.tools.estimate.report import draw, print_table
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.step import Estimate, Result
from lowtide.tools.estimate.table import COLUMNS, read, write
from lowtide.tools.estimate.tracker import CATEGORIES
from tests.support.drawings import drawn

GIB = 2**30
H200 = "NVIDIA H200"
ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks" / "h200" / "estimate_measured.csv"


@pytest.fixture
def pair():
    held = dict(zip(CATEGORIES, (3 * GIB, GIB, 6 * GIB, 2 * GIB, 8 * GIB)))
    eager = Estimate(
        Setting("m", 1, 1000), Loss.eager, held, "backward", 2 * GIB, GIB // 2, 10**9, "NVIDIA H200"
    )
    ours = replace(eager, loss=Loss.lowtide, held=held | {"logits": 0}, when="forward")
    return [Result(eager, out_of_memory=True), Result(ours, measured=int(12.5 * GIB))]


def test_table_contents(pair):
    console = Console(record=True, width=100)
    print_table(console, pair)
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["assumed:", "NVIDIA", "H200"] in lines
    assert ["logits", "8.00", "0.00"] in lines
    assert ["peak", "20.00", "12.00"] in lines
    assert ["reached", "in", "backward", "forward"] in lines
    assert ["measured", "out", "of", "memory", "12.50"] in lines
    assert ["estimate", "is", "off", "by", "-4.0", "%"] in lines


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_picture_bars(pair, tmp_path, kind):
    path = tmp_path / "deeper" / f"memory.{kind}"
    draw([*pair, *pair], path)
    content = path.read_bytes()
    if kind == "png":
        assert struct.unpack(">II", content[16:24]) == (1600, 608)
    else:
        assert content.count(b"<path d=") > 4 * 2


@pytest.mark.parametrize("tokens", [1000, 1_000_000])
def test_picture_labels_inside(pair, tmp_path, monkeypatch, tokens):
    """Also that of the longest bar, which is hundreds of GiB."""
    eager, ours = (replace(each.estimate, setting=Setting("m", 16, tokens)) for each in pair)
    large = replace(eager, held={name: 40 * size for name, size in eager.held.items()})
    results = [Result(ours, measured=12 * GIB), Result(large, measured=int(800.04 * GIB))]
    drawing = drawn(monkeypatch, lambda path: draw(results, path), tmp_path / "memory.png")
    drawing.check()
    words = {text for text, _ in drawing.words}
    assert {"12.00 GiB  (measured 12.00)", "800.00 GiB  (measured 800.04)"} <= words


def test_file_round_trip(pair, tmp_path):
    eager, ours = pair
    whole = Setting("a.json", 2, 64, Dtype.autocast, Optimizer.sgd, True, 2**20, tp=8)
    other = Result(replace(ours.estimate, setting=whole))
    path = tmp_path / "deeper" / "estimate.csv"
    write([eager, ours, other], path)
    assert read(path) == [eager, ours, other]
    assert [each.estimate.device for each in read(path)] == [H200] * 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n1,2\n", "is no CSV of lowtide estimate --csv"),
        (",".join(COLUMNS), "has no rows"),
        (f"{','.join(COLUMNS)}\n{'x,' * len(COLUMNS)}", "invalid literal for int"),
        (f"{','.join(COLUMNS)}\n2026-11-21,card", "estimate.csv: "),  # cut off
    ],
)
def test_file_of_other_kind(tmp_path, content, message):
    path = tmp_path / "estimate.csv"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read(path)


@pytest.mark.skipif(not MEASURED.exists(), reason="not measured on a card with --csv yet")
def test_page_matches_measurements():
    page = (ROOT / "docs" / "start" / "memory.md").read_text()
    told = re.findall(r"\| ([\d,]+) tokens, (\w+) \| ([\d.]+) \| ([\d.]+) \|", page)
    found = [
        (
            f"{one.estimate.setting.tokens:,}",
            one.estimate.loss.value,
            f"{one.estimate.peak / GIB:.2f}",
            f"{one.measured / GIB:.2f}",
        )
        for one in read(MEASURED)
    ]
    assert told == found
    assert len({tokens for tokens, *_ in found}) >= 2
    assert all(abs(float(mine) / float(theirs) - 1) < 0.1 for *_, mine, theirs in found)
