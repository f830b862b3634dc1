"""Make the tables of docs/_data: what ran with which versions, and what is known of which card."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

DATA = Path(__file__).parents[1] / "_data"
NOT_RUN = "nobody has run it: lowtide doctor --selftest tells"


def rows_of(name: str) -> list[dict[str, str]]:
    with (DATA / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]], rule: str = "---") -> str:
    """Return a table; the columns behind the first are ruled as `rule` says."""
    lines = [heading, ["---", *[rule] * (len(heading) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def versions() -> str:
    """Return what passed with each pair of Python and torch, and the frameworks, as Markdown."""
    rows = rows_of("versions")
    found = {(row["suite"], row["python"], row["torch"]): row for row in rows}
    pythons, torches = (
        sorted({row[name] for row in rows}, key=lambda release: [int(part) for part in release.split(".")])
        for name in ("python", "torch")
    )
    table = []
    for python in pythons:
        cells = (
            ", ".join(
                f"{words} {row['passed']} of {int(row['passed']) + int(row['failed'])}"
                for suite, words in (("contract", "contract"), ("selftest", "calls"))
                if (row := found.get((suite, python, each)))
            )
            for each in torches
        )
        table.append([f"Python {python}", *(cell or "–" for cell in cells)])
    lines = [markdown(["", *(f"torch {each}" for each in torches)], table)]
    for row in rows:
        if row["suite"] == "integrations":
            total = int(row["passed"]) + int(row["failed"])
            lines += [
                "",
                f"Tests of the integrations: {row['passed']} of {total} pass, with {row['versions']}.",
            ]
    return "\n".join(lines)


def platforms() -> str:
    """Return what is known of the calls on each platform, those alike in one row, as Markdown."""
    calls: dict[tuple[str, ...], list[str]] = {}
    for row in rows_of("platforms"):
        architecture = f" ({row['architecture']})" if row["architecture"] else ""
        expected = row["expected"].removesuffix(NOT_RUN).removesuffix("; ") or "not known"
        way = row["way"].rpartition(": ")[2]
        call = row["call"] + (f" ({way})" if way not in (row["call"], "none") else "")
        calls.setdefault((row["platform"] + architecture, row["status"], expected), []).append(call)
    body = [
        [platform, status, "; ".join(each), expected] for (platform, status, expected), each in calls.items()
    ]
    return markdown(["", "status", "calls (and their way)", "expected"], body)


def builds() -> str:
    """Return what the kernels of each way take on each architecture, as Markdown."""
    body = [
        [
            f"{row['architecture']}, {row['way']}",
            row["builds"],
            row["registers"],
            row["spilled_bytes"],
            f"{int(row['shared_bytes']):,} of {int(row['shared_limit']):,}",
        ]
        for row in rows_of("builds")
    ]
    return markdown(["", "builds", "registers", "spilled bytes", "shared memory, bytes"], body, "--:")


MAKERS: dict[str, Callable[[], str]] = {"builds": builds, "platforms": platforms, "versions": versions}


def add_makers(
    app: Sphinx, makers: Mapping[str, Callable[[], str]], files: Iterable[Path] = ()
) -> dict[str, Any]:
    """Add a directive for each maker, which puts its Markdown into a page; it reads these files."""

    class Made(SphinxDirective):
        def run(self) -> list[nodes.Node]:
            for file in files:
                self.env.note_dependency(str(file))
            return self.parse_text_to_nodes(makers[self.name]())

    for name in makers:
        app.add_directive(name, Made)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def setup(app: Sphinx) -> dict[str, Any]:
    return add_makers(app, MAKERS, [DATA / f"{name}.csv" for name in MAKERS])
