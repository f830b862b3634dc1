import io
import struct
from dataclasses import replace

import pytest
from rich.console import Console

from lowtide.tools.demo.config import Parallel
from lowtide.tools.demo.loop import Run
from lowtide.tools.demo.report import draw, peak_bytes, seconds_per_step, table
from lowtide.tools.demo.trainer import Step
from tests.support.drawings import drawn
from tests.support.extended import all_extended_but


@pytest.fixture
def runs(make_config):
    def run(loss, shift, seconds, peak):
        history = [
            Step(
                number,
                10 - number / 10 + shift,
                9.0 if number % 10 == 0 else seconds,
                None if number % 10 else peak,
            )
            for number in range(25)
        ]
        return Run(make_config(loss=loss), history, validation_loss=7.25 + shift)

    return [run("lowtide", 0.0, 0.5, 80_000_000), run("eager", 1e-5, 0.8, 1_200_000_000)]


def test_time_without_measuring_steps(runs):
    assert seconds_per_step(runs[0]) == 0.5
    assert peak_bytes(runs[0]) == 80_000_000


def test_table(runs):
    paper = Console(file=io.StringIO(), width=80)
    paper.print(table(runs))
    lines = [line for line in paper.file.getvalue().splitlines() if len(line.split()) > 6]
    rows = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert "last row: how far the losses are apart" in paper.file.getvalue()
    assert rows["lowtide"].split("│")[2:-1] == [
        "   7.600000 ",
        "   7.250000 ",
        " 500 ms ",
        "      512 ",
        " 80.0 MB ",
    ]
    assert "1.20 GB" in rows["eager"]
    assert rows["eager vs lowtide"].replace("│", " ").split() == [
        *("eager", "vs", "lowtide"),
        "1.0e-05",
        "1.0e-05",
        "1.60x",
        "15.0x",
    ]


@pytest.fixture
def on_ranks(runs):
    """The same history of two ranks, and of one process."""
    config = replace(runs[0].config, parallel=Parallel.shard_head, ranks=2)
    return [replace(runs[0], config=config), replace(runs[1], config=runs[0].config)]


def test_table_of_ranks(on_ranks):
    paper = Console(file=io.StringIO(), width=100)
    paper.print(table(on_ranks))
    lines = [line for line in paper.file.getvalue().splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == ["2 ranks", "one process", "one process vs 2 ranks"]
    assert rows[2][1:] == ["1.0e-05", "1.0e-05", "1.60x", "", "15.0x"]
    assert "shard_head" in paper.file.getvalue()
    assert "hold at once on a rank" in paper.file.getvalue()


def test_figure_of_ranks(on_ranks, tmp_path, monkeypatch):
    drawing = drawn(monkeypatch, lambda path: draw(on_ranks, path), tmp_path / "comparison.png")
    drawing.check()
    words = [text for text, _ in drawing.words]
    for text in ("Training loss, shard_head", "one process", "2 ranks, within 1e-05", "2 ranks  80.0 MB"):
        assert text in words


def test_figure_size(runs, tmp_path):
    draw(runs, tmp_path / "deeper" / "figure.png")
    header = (tmp_path / "deeper" / "figure.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (1600, 672)


@pytest.mark.parametrize(
    "eager",
    all_extended_but([165_000_000], [1_200_000_000, 165_000_000, 155_000_000, 80_000_000, 50_000_000]),
)
def test_texts_do_not_overlap(runs, eager, tmp_path, monkeypatch):
    """At any ratio of the peaks, 15 or 1.1 or less than 1."""
    history = [
        replace(step, peak_bytes=None if step.peak_bytes is None else eager) for step in runs[1].history
    ]
    runs = [runs[0], replace(runs[1], history=history)]
    drawing = drawn(monkeypatch, lambda path: draw(runs, path), tmp_path / "comparison.png")
    drawing.check()
    assert drawing.is_in_a_panel(f"{eager / 80_000_000:.1f}x")
    assert drawing.is_in_a_panel("classes")
