"""`lowtide bench compare`: what has changed between two CSVs of the same command."""

import csv
from pathlib import Path

import pytest

from lowtide.tools import environment
from lowtide.tools.bench.compare import CASE, FIGURES, compare
from tests.support.commands import invoke, said

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
STEP = BENCHMARKS / "cpu" / "linear_cross_entropy_step.csv"


@pytest.fixture
def changed(tmp_path):
    """Writes a copy of a CSV with rows edited by a function; False from it leaves a row out."""

    def write(path, edit):
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows = [row for row in reader if edit(row) is not False]
        copy = tmp_path / "after.csv"
        with copy.open("w", newline="") as file:
            writer = csv.DictWriter(file, reader.fieldnames, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        return copy

    return write


def rows(path):
    with path.open(newline="") as file:
        yield from csv.DictReader(file)


def scaled(provider, **factors):
    def edit(row):
        if row["provider"] == provider and row["dtype"] == "float32":
            for figure, factor in factors.items():
                row[figure] = repr(float(row[figure]) * factor)

    return edit


def run(*arguments):
    return invoke("bench", "compare", *map(str, arguments))


def test_a_file_with_itself():
    done = run(STEP, STEP)
    assert done.exit_code == 0, done.output
    found = compare(STEP, STEP)
    assert {change.figure for change in found.changes} == {"ms", "ratio", "peak_bytes"}
    assert len(found.changes) == 3 * (len(STEP.read_text().splitlines()) - 1)
    assert f"0 of {len(found.changes)} figures changed by more than 2 %" in done.output


@pytest.mark.parametrize(("factor", "code"), [(1.019, 0), (1.021, 1), (0.981, 0), (0.979, 1)])
def test_a_change_beyond_two_percent(changed, factor, code):
    after = changed(STEP, scaled("lowtide", ms=factor))
    done = run(STEP, after)
    assert done.exit_code == code, done.output
    (one,) = (change for change in compare(STEP, after).changes if change.percent != 0)
    assert one.row == "cpu 2048 512 32768 float32 step random lowtide"
    assert (one.figure, one.before) == ("ms", float(next(rows(STEP))["ms"]))
    assert one.percent == pytest.approx(100 * (factor - 1))
    if code:
        assert f"{one.percent:+.1f} %" in done.output
        assert "1 of " in done.output


def test_another_threshold(changed):
    after = changed(STEP, scaled("eager", ms=1.04, peak_bytes=1.04))
    assert len(compare(STEP, after).beyond(2)) == 2
    assert run(STEP, after, "--percent", "5").exit_code == 0


def test_rows_without_a_counterpart(changed):
    def edit(row):
        if row["provider"] == "lowtide":
            row["status"], row["ms"] = "failed", ""
        return row["provider"] != "eager"

    done = run(STEP, changed(STEP, edit))
    assert done.exit_code == 1
    assert "cpu 2048 512 32768 float32 step random lowtide: ok before, failed after" in said(done)
    assert f"cpu 2048 512 32768 float32 step random eager: only in {STEP}" in said(done)


def test_surroundings_are_said(changed):
    done = run(STEP, changed(STEP, lambda row: row.update(card="another", lowtide="0123456789ab")))
    assert done.exit_code == 0
    assert "card: x86_64 AVX512, 2 threads before, another after" in said(done)
    assert f"lowtide: {next(rows(STEP))['lowtide']} before, 0123456789ab after" in said(done)
    assert "torch" not in said(done)


@pytest.mark.parametrize("path", sorted(BENCHMARKS.rglob("*.csv")), ids=lambda path: path.stem)
def test_columns_of_the_benchmarks(path):
    """A column is one of the case or the surroundings, or is measured: the first find rows."""
    with path.open(newline="") as file:
        columns = set(csv.DictReader(file).fieldnames)
    measured = ("_ms", "ms_p20", "ms_p80", "_us", "_tflops", "_bytes", "_error", "_ratio")
    measured += ("_over_torch", "_per_second", "step_loss", "largest_logit")
    about_the_case = {"head", "tied", "softcap", "source", "ignored"}
    others = {
        *about_the_case,
        *("version", "engine", "way", "chunks", "best_of_torch", "status", "reason", "checked", "truth"),
        *("over_plain", "when"),
        *("copy_of_logits", "hidden_states", "parameters", "end", "bytes"),
    }
    known = {*CASE, *FIGURES, *environment.ENVIRONMENT, *others}
    assert not {each for each in columns - known if not each.endswith(measured)}
    assert set(environment.ENVIRONMENT) <= columns


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "has no column 'card'"),
        ("card,end\nH200,\n", "has none of the columns ms,"),
        ("card,case,ms\nH200,A,1\nH200,A,2\n", "has two rows of A"),
        ("card,case,ms\nH200,A,\n", "have no figures in common"),
    ],
)
def test_files_that_cannot_be_compared(tmp_path, text, message):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    done = run(path, path)
    assert done.exit_code == 1
    assert message in said(done)


def test_clocks_of_a_card(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho \"$@\" >&2\ntest $1 = --id=GPU-7 && echo '1980 MHz, 3201 MHz, 700.00 W'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for uuid, clocks in (("7", "SM 1980 MHz, memory 3201 MHz, 700.00 W"), ("8", "")):
        properties = type("Properties", (), {"uuid": uuid})
        monkeypatch.setattr(environment.torch.cuda, "get_device_properties", lambda given=properties: given)
        assert environment.clocks("cuda") == clocks
