import csv
import struct
import sys

import pytest

from lowtide.tools.bench import draw
from lowtide.tools.bench.cases import AXES, CASES, LossCase, Mode, sweep
from lowtide.tools.bench.measure import Figures, Row
from lowtide.tools.bench.providers import Provider
from lowtide.tools.bench.table import LOSS, cells
from lowtide.tools.environment import Environment
from lowtide.tools.errors import UserError
from lowtide.tools.files import growing_table
from tests.support.commands import invoke, rows_of
from tests.support.drawings import drawn
from tests.support.extended import all_extended_but

CENTER = next(case for case in CASES if case.name == "A")
HERE = Environment("2026-01-01", "SYNTHETIC", "2.11.0", "3.6.0", "0123456789ab", "", "lowtide bench")
NAMES = ("lowtide", "lowtide-256MiB", "eager", "quack", "liger")


def synthetic_row(case: LossCase, name: str) -> Row:
    """Made up. Nothing of quack; eager does not fit at the largest shapes."""
    provider = Provider(name, "torch", lambda case: None)
    logits = case.tokens * case.classes
    if name == "quack" or (name == "eager" and logits > 2**31):
        return Row(case, Mode.STEP, provider, None, "does not fit in memory: 40 GiB")
    ms = 6e-9 * logits * case.features / 500 * (1 + NAMES.index(name))
    errors = (1e-7, 1e-3 * (1 + NAMES.index(name)), 2e-3)
    return Row(case, Mode.STEP, provider, Figures(ms, ms, ms, ms, 1.0, 10 * logits, errors))


def write(path, cases=None, names=NAMES):
    with growing_table(path, LOSS.columns) as keep:
        for case in sweep(CENTER, AXES) if cases is None else cases:
            for name in names:
                keep(cells(synthetic_row(case, name), HERE, LOSS))
    return path


def test_points_match_rows(tmp_path):
    sweeps = draw.read(write(tmp_path / "sweep.csv"))
    assert sweeps.center == {"tokens": 16384, "features": 2048, "classes": 131072}
    assert list(sweeps.lines) == list(AXES)
    assert sweeps.absent == ["quack"]
    ours = sweeps.lines["features"]["lowtide"]
    assert [point.size for point in ours] == [256, 512, 1024, 2048, 4096]
    assert [point.throughput for point in ours] == pytest.approx([500] * 5, rel=1e-5)
    assert {point.memory for point in ours} == {10 * 2**31}
    assert {point.error for point in ours} == {2e-3}, "the larger of the two"
    assert [point.size for point in sweeps.lines["tokens"]["eager"]] == [2048, 4096, 8192, 16384]
    assert sweeps.lines["classes"]["liger"][0].error == 5e-3


def test_sweep_along_one_axis(tmp_path):
    sweeps = draw.read(write(tmp_path / "sweep.csv", sweep(CENTER, ["tokens"])))
    assert list(sweeps.lines) == ["tokens"]
    draw.draw(tmp_path / "sweep.csv", tmp_path / "one.svg")
    assert "features D" not in (tmp_path / "one.svg").read_text()


def test_command_draws_csv(tmp_path):
    rows, out = write(tmp_path / "sweep.csv"), tmp_path / "docs" / "sweep.png"
    done = invoke("bench", "draw", rows, "--out", out)
    assert (done.exit_code, done.stderr) == (0, "")
    picture = out.read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", picture[16:24]) == (1600, 1472)


def test_column_missing(tmp_path):
    whole = write(tmp_path / "sweep.csv")
    rows = rows_of(whole)
    less = [name for name in rows[0] if name != "peak_bytes"]
    with (tmp_path / "less.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, less, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    chosen = ["draw", str(tmp_path / "less.csv"), "--out", str(tmp_path / "sweep.svg")]
    done = invoke("bench", *chosen)
    said = (
        f"lowtide bench draw: {tmp_path / 'less.csv'} has no column 'peak_bytes': it is no CSV of a sweep\n"
    )
    assert (done.exit_code, done.output) == (1, said)
    assert not (tmp_path / "sweep.svg").exists()


@pytest.mark.parametrize(
    ("cases", "said"),
    [
        ([CENTER], "must hold the sweeps around one shape, and holds: none"),
        (sweep(CENTER, ["tokens"])[:2], "no row of the case 'A'"),
        ([*sweep(CENTER, AXES), *sweep(CASES[1], AXES)], "holds: A, B"),
    ],
)
def test_csv_of_no_sweep(tmp_path, cases, said):
    with pytest.raises(UserError, match=said):
        draw.read(write(tmp_path / "sweep.csv", cases))


def test_input_refused(tmp_path):
    path = write(tmp_path / "sweep.csv")
    with pytest.raises(UserError, match=r"ends in \.svg or \.png"):
        draw.draw(path, tmp_path / "sweep.jpeg")
    text = path.read_text()
    path.write_text(text.replace(",step,", ",forward,"))
    with pytest.raises(UserError, match="holds: forward"):
        draw.read(path)
    path.write_text(text.replace(",ok,,", ",ok,,x", 1))
    with pytest.raises(UserError, match="could not convert"):
        draw.read(path)


@pytest.mark.parametrize("names", all_extended_but([NAMES], [NAMES, [f"lowtide-{i}" for i in range(14)]]))
def test_names_do_not_overlap(tmp_path, names, monkeypatch):
    """Nor are they outside the picture or over a line."""
    monkeypatch.setattr(sys.modules[__name__], "NAMES", names)
    rows = write(tmp_path / "sweep.csv", names=names)
    drawing = drawn(monkeypatch, lambda path: draw.draw(rows, path), tmp_path / "sweep.png")
    drawing.check()
    assert {text for text, _ in drawing.words} & set(names) == set(names) - {"quack"}


def test_names_absent_from_last_panel(tmp_path, monkeypatch):
    path = write(tmp_path / "sweep.csv")
    kept = [line for line in path.read_text().splitlines() if not ("liger" in line and "-features-" in line)]
    path.write_text("\n".join(line for line in kept if not (",A,16384" in line and "liger" in line)))
    assert "liger" not in draw.read(path).lines["features"]
    drawing = drawn(monkeypatch, lambda out: draw.draw(path, out), tmp_path / "sweep.png")
    assert [text for text, _ in drawing.words].count("liger") == 1
