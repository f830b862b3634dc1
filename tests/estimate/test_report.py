import struct
from dataclasses import replace

import pytest
from rich.console import Console

from lowtide.estimate.report import Result, draw, print_table
from lowtide.estimate.setting import Loss, Setting
from lowtide.estimate.step import Estimate
from lowtide.estimate.tracker import CATEGORIES

GIB = 2**30


@pytest.fixture
def pair():
    held = dict(zip(CATEGORIES, (3 * GIB, GIB, 6 * GIB, 2 * GIB, 8 * GIB)))
    eager = Estimate(Setting("m", 1, 1000), Loss.eager, held, "backward", 2 * GIB, GIB // 2, 10**9)
    ours = replace(eager, loss=Loss.lowtide, held=held | {"logits": 0}, when="forward")
    return [Result(eager, out_of_memory=True), Result(ours, measured=int(12.5 * GIB))]


def test_the_table_says_it_all(pair):
    console = Console(record=True, width=100)
    print_table(console, pair)
    lines = [line.replace("│", " ").split() for line in console.export_text().splitlines()]
    assert ["logits", "8.00", "0.00"] in lines
    assert ["peak", "20.00", "12.00"] in lines
    assert ["reached", "in", "backward", "forward"] in lines
    assert ["measured", "out", "of", "memory", "12.50"] in lines
    assert ["estimate", "is", "off", "by", "-4.0", "%"] in lines


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_picture_has_a_bar_for_each(pair, tmp_path, kind):
    path = tmp_path / "deeper" / f"memory.{kind}"
    draw([*pair, *pair], path)
    content = path.read_bytes()
    if kind == "png":
        assert struct.unpack(">II", content[16:24]) == (1600, 608)
    else:
        assert content.count(b"<path d=") > 4 * 2
