"""Make tables of rows of benchmarks/*.csv:

    ```{benchmark} h200/linear_cross_entropy_step.csv
    :where: case=A
    :rows: lowtide, eager
    :columns: provider, ms, ratio, peak
    :command: lowtide bench linear-cross-entropy --case A
    ```

Each number links to its run, which is listed below the table: command, commit, card, versions,
date. `:across: provider` gives each provider a column, of the one value that `:columns:` then ends
with; `:across: side` one to each but torch's own kernels of attention, of which the quickest is
"torch". `:best: lowest` prints the lowest number of each line in bold. `:absent: Not measured yet.`
stands in place of the table while the file, or a row of it, is not there.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import benchmark_records
from benchmark_columns import ACROSS, COLUMNS, TEXTS
from benchmark_records import Record, Runs, describe, is_absent, records_of
from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class Cell(NamedTuple):
    """Hold a cell's text, the record that it is of, and whether it is its line's best."""

    text: str
    record: Record | None = None
    best: bool = False


class Table(NamedTuple):
    heading: list[str]
    body: list[list[Cell]]
    numbers: list[bool]
    """Which columns are of numbers."""


def table_of(file: str, options: Mapping[str, str]) -> Table:
    """Return the table of a directive's argument and options."""
    records = records_of(file, options.get("where", ""), options.get("rows", ""))
    names = [name.strip() for name in options["columns"].split(",")]
    if "across" in options:
        heading, body = _pivot(records, names, options["across"], options.get("best", ""))
    else:
        heading = [COLUMNS[name].heading for name in names]
        body = [_cells(record, names) for record in records]
    numbers = [name not in TEXTS for name in names] + [True] * (len(heading) - len(names))
    return Table(heading, body, numbers)


def _cells(record: Record, names: Sequence[str]) -> list[Cell]:
    failed = record.get("status", "ok") != "ok"
    cells = []
    for name in names:
        if name in TEXTS:
            cells.append(Cell(COLUMNS[name].text(record)))
        elif failed:
            cells.append(Cell(record["status"] if name == names[1] else ""))
        else:
            cells.append(Cell(COLUMNS[name].text(record), record))
    return cells


def _pivot(
    records: Sequence[Record], names: Sequence[str], field: str, best: str
) -> tuple[list[str], list[list[Cell]]]:
    """Return a line for each set of texts that labels have; a number is that of the first row."""
    *labels, value = names
    column_of = ACROSS.get(field, lambda record: record[field])
    ran = [record for record in records if record.get("status", "ok") == "ok" and column_of(record)]
    across = list(dict.fromkeys(map(column_of, ran)))
    lines: dict[tuple[str, ...], dict[str, Record]] = {}
    for record in ran:
        key = tuple(COLUMNS[name].text(record) for name in labels if name in TEXTS)
        lines.setdefault(key, {})[column_of(record)] = record
    body = []
    for found in lines.values():
        first = next(iter(found.values()))
        cells = [Cell(COLUMNS[name].text(first), None if name in TEXTS else first) for name in labels]
        values = [
            Cell(COLUMNS[value].text(found[each]), found[each]) if each in found else Cell("–")
            for each in across
        ]
        if best:
            lowest = min(map(_sum_of, values))
            values = [each._replace(best=_sum_of(each) == lowest) for each in values]
        body.append([*cells, *values])
    return [*(COLUMNS[name].heading for name in labels), *across], body


def _sum_of(cell: Cell) -> float:
    """Return the number that a cell shows, forward and backward together."""
    if cell.record is None or not cell.text:
        return math.inf
    return sum(float(part.replace(",", "")) for part in cell.text.split(" / "))


def markdown(file: str, options: Mapping[str, str]) -> str:
    """Return the table, and the runs that its numbers are of, for a page that is read as a file."""
    if is_absent(file, options):
        return options["absent"]
    table, runs = table_of(file, options), Runs(file, options["command"])
    lines = [table.heading, ["--:" if each else "---" for each in table.numbers]]
    for cells in table.body:
        lines.append([f"**{each.text}**" if each.best else each.text for each in cells])
        for each in cells:
            if each.record is not None and each.text:
                runs.number(each.record)
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text + "\n\n" + "\n".join(f"* `{command}` · {rest}" for _, command, rest in runs.described())


class Benchmark(SphinxDirective):
    """Make the table of the rows that the options name."""

    required_arguments = 1
    option_spec = {  # noqa: RUF012 (docutils reads it from the class)
        "where": directives.unchanged,
        "rows": directives.unchanged,
        "columns": directives.unchanged_required,
        "across": directives.unchanged,
        "best": lambda argument: directives.choice(argument, ("lowest",)),
        "command": directives.unchanged_required,
        "absent": directives.unchanged_required,
    }

    def run(self) -> list[nodes.Node]:
        (file,) = self.arguments
        self.env.note_dependency(str(benchmark_records.BENCHMARKS / file))
        if is_absent(file, self.options):
            return [nodes.paragraph("", self.options["absent"])]
        table, runs = table_of(file, self.options), Runs(file, self.options["command"])
        place = f"run-{self.env.new_serialno('benchmark')}"
        body = [[_linked(cell, runs, place) for cell in cells] for cells in table.body]
        items = nodes.bullet_list(classes=["runs"])
        for number, command, rest in runs.described():
            paragraph = nodes.paragraph()
            paragraph += [nodes.literal("", command), nodes.Text(f" · {rest}")]
            items += nodes.list_item("", paragraph, ids=[f"{place}-{number}"])
        return [_table(table.heading, body, table.numbers), items]


def _linked(cell: Cell, runs: Runs, place: str) -> nodes.Node:
    if cell.record is None or not cell.text:
        return nodes.Text(cell.text)
    words = nodes.strong("", cell.text) if cell.best else nodes.Text(cell.text)
    return nodes.reference(
        "",
        "",
        words,
        internal=True,
        refid=f"{place}-{runs.number(cell.record)}",
        reftitle=describe(cell.record, runs.command, runs.file),
        classes=["measured"],
    )


def _table(
    heading: Sequence[str], body: Iterable[Sequence[nodes.Node]], numbers: Sequence[bool]
) -> nodes.table:
    columns = nodes.tgroup(cols=len(heading))
    columns += [nodes.colspec(colwidth=1) for _ in heading]
    head, rows = nodes.thead(), nodes.tbody()
    head += _row([nodes.Text(each) for each in heading], numbers)
    rows += [_row(cells, numbers) for cells in body]
    columns += [head, rows]
    return nodes.table("", columns, classes=["benchmark"])


def _row(cells: Sequence[nodes.Node], numbers: Sequence[bool]) -> nodes.row:
    row = nodes.row()
    for cell, number in zip(cells, numbers):
        row += nodes.entry("", nodes.paragraph("", "", cell), classes=["number"] if number else [])
    return row


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("benchmark", Benchmark)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
