"""The tables of platforms, builds and versions say what each row of docs/_data says."""

import pytest

from tests.docs.snippets import DOCS

pytest.importorskip("sphinx")
PAGE = (DOCS / "reference" / "platforms.md").read_text()


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    import data_tables

    return data_tables


def lines_of(table):
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]


def test_each_call_of_each_platform(tables):
    rows = tables.rows_of("platforms")
    lines = lines_of(tables.platforms())
    assert len(lines) < len(rows)
    assert sum(len(calls.split("; ")) for _, _, calls, _ in lines) == len(rows)
    for row in rows:
        (line,) = [
            each
            for each in lines
            if each[0].startswith(row["platform"])
            and each[1] == row["status"]
            and any(call.partition(" (")[0] == row["call"] for call in each[2].split("; "))
        ]
        assert row["architecture"] in line[0]
        assert row["way"].rpartition(": ")[2] in line[2] or row["way"] == "none"
        assert line[3] == "not known" or line[3] in row["expected"]
        assert (line[3] == "not known") == (row["expected"] == tables.NOT_RUN)


def test_each_build(tables):
    lines = lines_of(tables.builds())
    for row, line in zip(tables.rows_of("builds"), lines, strict=True):
        found = [line[0], *(each.replace(",", "") for each in line[1:])]
        shared = f"{row['shared_bytes']} of {row['shared_limit']}"
        assert found == [
            f"{row['architecture']}, {row['way']}",
            *(row[name] for name in ("builds", "registers", "spilled_bytes")),
            shared,
        ]


def test_each_pair_that_ran(tables):
    table = tables.versions()
    lines = {line[0]: line[1:] for line in lines_of(table)}
    heading = table.splitlines()[0]
    for row in tables.rows_of("versions"):
        total = int(row["passed"]) + int(row["failed"])
        if row["suite"] == "integrations":
            assert f"{row['passed']} of {total} pass, with {row['versions']}" in table
            continue
        place = [each.strip() for each in heading.split("|")[2:]].index(f"torch {row['torch']}")
        words = {"contract": "contract", "selftest": "calls"}[row["suite"]]
        assert f"{words} {row['passed']} of {total}" in lines[f"Python {row['python']}"][place]


def test_page_has_them(tables):
    for make in tables.MAKERS.values():
        assert make() in PAGE
