import csv
import struct
from dataclasses import replace
from pathlib import Path

import pytest

from lowtide.tools.profile.last_stage import COLUMNS, OWN, SMOKE, STEPS, Line, Shape, draw, read, write
from lowtide.tools.profile.timeline import Timeline
from tests.support.commands import invoke
from tests.support.drawings import drawn

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "benchmarks" / "h200" / "memory_timeline.csv"


def run(*arguments):
    return invoke("bench", "memory-timeline", *arguments)


def test_smoke_run(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    path, picture = tmp_path / "deeper" / "timeline.csv", tmp_path / "timeline.png"
    done = run("--smoke", "--device", "cpu", "--csv", path, "--picture", picture)
    assert done.exit_code == 0, done.output
    lines = {(line.shape, line.provider): line for line in read(path)}
    assert list(lines) == [(shape, name) for shape in SMOKE for name in ("eager", "lowtide")]
    for shape in SMOKE:
        logits = shape.batch * shape.length * shape.classes
        eager, ours = (lines[shape, name].timeline for name in ("eager", "lowtide"))
        assert eager.peak > 3 * 4 * logits
        assert ours.peak < eager.peak / 1.5
        # The peak comes once a step, and everything is given back in the end.
        assert sum(level == eager.peak for level in eager.bytes) == STEPS
        assert eager.bytes[-1] < logits
        assert f"[{shape.batch}, {shape.length}] eager: {eager.peak / 2**20:,.2f} MiB" in done.output
    assert struct.unpack(">II", picture.read_bytes()[16:24]) == (1600, 672)
    again = tmp_path / "again.png"
    assert run("--draw-only", "--csv", path, "--picture", again).exit_code == 0
    assert again.read_bytes() == picture.read_bytes(), "drawn from the CSV alone"


def test_csv_round_trip(tmp_path):
    shape = Shape(1, 32_768, 4096, 128_256)
    lines = [
        Line(shape, "eager", "out of memory", Timeline([0.0, 1.5], [0, 2**40])),
        Line(shape, "lowtide", "", Timeline([0.0, 2.25], [5, 2**30])),
    ]
    write(lines, tmp_path / "timeline.csv", "cpu")
    assert read(tmp_path / "timeline.csv") == lines
    with (tmp_path / "timeline.csv").open() as file:
        assert next(csv.reader(file)) == [*COLUMNS, *OWN]
    draw(lines, tmp_path / "timeline.svg")
    assert b"out of memory" in (tmp_path / "timeline.svg").read_bytes()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("a,b\n1,2\n", "is no CSV of"), (",".join((*COLUMNS, *OWN)), "has no rows")],
)
def test_csv_of_another_kind(tmp_path, content, message):
    path = tmp_path / "timeline.csv"
    if content is not None:
        path.write_text(content)
    done = run("--draw-only", "--csv", path)
    assert done.exit_code == 1
    (line,) = done.output.splitlines()
    assert message in line


def test_shapes_refused_on_cpu(tmp_path):
    done = run("--device", "cpu", "--csv", tmp_path / "timeline.csv")
    assert done.exit_code == 1
    assert "add --smoke" in done.output
    assert not list(tmp_path.iterdir())


def test_words_do_not_overlap_lines(tmp_path, monkeypatch):
    """Of what was measured, where one line lies under the other, and of a run that ended early."""
    lines = read(MEASURED)
    lines[0] = replace(lines[0], end="out of memory")
    drawn(monkeypatch, lambda path: draw(lines, path), tmp_path / "timeline.png").check()


def test_page_matches_measurement():
    lines = read(MEASURED)
    first, second = (
        " and ".join(f"{line.timeline.peak / 2**30:.1f}" for line in lines if line.provider == name)
        for name in ("eager", "lowtide")
    )
    page = " ".join((ROOT / "docs" / "start" / "memory.md").read_text().split())  # wherever its lines end
    assert f"Its peaks are {first} GiB, lowtide's {second};" in page
