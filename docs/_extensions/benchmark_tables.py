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

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lowtide.tools.bench.attention.real_table import TORCH
from lowtide.tools.bench.attention.table import ERRORS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GRADIENTS = ("grad_input_error", "grad_weight_error")
Record = dict[str, str]


class Column(NamedTuple):
    """Define a column: its heading, and the text that it makes of a record."""

    heading: str
    text: Callable[[Record], str]


def _number(field: str, form: str, factor: float = 1.0) -> Callable[[Record], str]:
    return lambda record: format(float(record[field]) * factor, form) if record[field] else ""


def _milliseconds(field: str) -> Callable[[Record], str]:
    return lambda record: format(float(record[field]), ".1f" if float(record[field]) < 1000 else ",.0f")


def _peak_of_estimate(record: Record) -> str:
    kinds = ("weights", "gradients", "optimizer", "activations", "logits")
    return format(sum(int(record[f"{kind}_bytes"]) for kind in kinds) / 2**30, ".2f")


def _both(field: str, form: str) -> Callable[[Record], str]:
    """Return forward and backward in one cell; of inference there is forward alone."""
    names = (f"forward_{field}", f"backward_{field}")
    return lambda record: " / ".join(format(float(record[name]), form) for name in names if record[name])


def _spread(record: Record) -> str:
    """Return the 20th and the 80th percentile of both times, where a row has them."""
    names = [name for name in ("forward_ms", "backward_ms") if record[f"{name}_p20"]]
    return " / ".join(f"{float(record[f'{n}_p20']):.0f}–{float(record[f'{n}_p80']):.0f}" for n in names)


def _largest(record: Record, *fields: str) -> str:
    return format(max(float(record[field]) for field in fields if record[field]), ".1e")


def _side(record: Record) -> str | None:
    """Return whose column a row of attention stands in; None for torch's slower kernels."""
    if record["provider"] == record["best_of_torch"]:
        return "torch"
    return None if record["provider"] in TORCH else record["provider"]


def _attention_shape(record: Record) -> str:
    return f"{_batches_and_heads(record)}, {record['queries']} × {record['keys']}, {record['features']}"


def _square_attention_shape(record: Record) -> str:
    """Return the shape of a case that has as many keys as queries."""
    return f"{_batches_and_heads(record)}, {record['queries']}, {record['features']}"


def _batches_and_heads(record: Record) -> str:
    heads, key_heads = record["heads"], record["key_heads"]
    return f"{record['batches']}, {heads if heads == key_heads else f'{heads}/{key_heads}'}"


def _of_plain(record: Record) -> str:
    return format(1 + float(record["over_plain"]), ".2f")


COLUMNS = {
    "provider": Column("", lambda record: record["provider"]),
    "loss of": Column("loss", lambda record: record["loss"]),
    "case": Column("case", lambda record: record["case"]),
    "shape": Column(
        "N × D × V", lambda record: " × ".join(map(record.get, ("tokens", "features", "classes")))
    ),
    "length": Column("tokens", _number("length", ",.0f")),
    "dtype": Column("dtype", lambda record: record["dtype"]),
    "engine": Column("kernel", lambda record: record["engine"]),
    "ms": Column("ms", _milliseconds),
    "ratio": Column("ratio", _number("ratio", ".2f")),
    "fine ratio": Column("ratio", _number("ratio", ".3f")),
    "ranks": Column("ranks", lambda record: record["ranks"]),
    "head": Column("head", lambda record: record["head"]),
    "head shape": Column("D × V", lambda record: f"{record['features']} × {record['classes']}"),
    "tokens": Column("N", lambda record: f"{int(record['tokens']):,}"),
    "floor": Column("floor, ms", _number("floor_ms", ".2f")),
    "aligned floor": Column("aligned floor, ms", _number("aligned_floor_ms", ".2f")),
    "chunks": Column("tokens of a chunk", lambda record: record["chunks"]),
    "gradients": Column("error of dX or dW", lambda record: _largest(record, *GRADIENTS)),
    "aligned ratio": Column("ratio", _number("aligned_ratio", ".2f")),
    "predicted ratio": Column("predicted", _number("predicted_ratio", ".2f")),
    "over plain": Column("over plain", _number("over_plain", "+.1%")),
    "over dense": Column("over dense", _number("over_plain", "+.1%")),
    "of dense": Column("of dense", _of_plain),
    "of counted": Column("of the counted tokens alone", _of_plain),
    "ignored": Column("ignored", lambda record: f"{float(record['ignored']):.0%}"),
    "peak": Column("peak beyond, MiB", _number("peak_bytes", ",.0f", 2**-20)),
    "tokens per second": Column("tokens/s", _number("tokens_per_second", ",.0f")),
    "whole peak": Column("peak, GiB", _number("peak_bytes", ".1f", 2**-30)),
    "step loss": Column("loss", _number("step_loss", ".4f")),
    "loss": Column("error: loss", _number("loss_error", ".1e")),
    "dX": Column("dX", _number("grad_input_error", ".1e")),
    "dW": Column("dW", _number("grad_weight_error", ".1e")),
    "forward": Column("forward, TFLOP/s", _number("forward_tflops", ",.0f")),
    "backward": Column("backward, TFLOP/s", _number("backward_tflops", ",.0f")),
    "forward ms": Column("forward, ms", _number("forward_ms", ".2f")),
    "backward ms": Column("backward, ms", _number("backward_ms", ".2f")),
    "step ratio": Column("time, of the best peer's", _number("step_ratio", ".2f")),
    "error": Column("error of the result", _number("out_error", ".1e")),
    "model": Column("model", lambda record: record["model"]),
    "attention": Column("B, H, M × N, K", _attention_shape),
    "square attention": Column("B, H, M, K", _square_attention_shape),
    "both tflops": Column("TFLOP/s, forward / backward", _both("tflops", ",.0f")),
    "both whole ms": Column("ms, forward / backward", _both("ms", ",.0f")),
    "spread": Column("20th to 80th percentile", _spread),
    "options": Column("options", lambda record: record["options"]),
    "both ms": Column("ms, forward / backward", _both("ms", ".2f")),
    "both over torch": Column("over torch's quickest", _both("over_torch", ".2f")),
    "peak over torch": Column("memory over its", _number("peak_over_torch", ".2f")),
    "best of torch": Column("torch's quickest", lambda record: record["best_of_torch"]),
    "host": Column("host, µs", _both("host_us", ".0f")),
    "operator": Column("", lambda record: record["operator"]),
    "host call": Column(
        "N, D, V",
        lambda record: (
            f"{record['tokens']}, {record['features']}, {record['classes']}" if record["classes"] else ""
        ),
    ),
    "host forward": Column("forward", _number("forward_us", ",.0f")),
    "host backward": Column("backward", _number("backward_us", ",.0f")),
    "torch forward": Column("torch: forward", _number("eager_forward_us", ",.0f")),
    "torch backward": Column("torch: backward", _number("eager_backward_us", ",.0f")),
    "way": Column("why", lambda record: record["way"]),
    "largest error": Column("largest error", lambda record: _largest(record, *ERRORS)),
    "estimated": Column("estimated, GiB", _peak_of_estimate),
    "measured": Column("measured, GiB", _number("measured_bytes", ".2f", 2**-30)),
}
COLUMNS["ms"] = Column("ms", _milliseconds("ms"))
TEXTS = {
    *("provider", "loss of", "case", "shape", "dtype", "engine", "length", "head"),
    *("model", "ranks", "attention", "square attention", "options", "best of torch"),
    *("head shape", "tokens", "chunks", "ignored", "way"),
}
ACROSS: dict[str, Callable[[Record], str | None]] = {"side": _side}


def is_absent(file: str, options: Mapping[str, str]) -> bool:
    """Return whether the directive says what stands for rows that are not there, and none is."""
    if "absent" not in options:
        return False
    return not (BENCHMARKS / file).exists() or not _chosen(file, options.get("where", ""))


def _chosen(file: str, where: str) -> list[Record]:
    with (BENCHMARKS / file).open(newline="") as lines:
        found = list(csv.DictReader(lines))
    for condition in where.split():
        field, _, values = condition.partition("=")
        found = [record for record in found if record[field] in values.split("|")]
    return found


def records_of(file: str, where: str, rows: str = "") -> list[Record]:
    """Return the records whose fields have these values, `a=1|2 b=3`; in the order of `rows`."""
    found = _chosen(file, where)
    names = [name.strip() for name in rows.split(",") if name.strip()]
    if names:
        missing = set(names) - {record["provider"] for record in found}
        if missing:
            raise ValueError(f"{file} has no row of {sorted(missing)} where {where}")
        found = sorted(
            (record for record in found if record["provider"] in names),
            key=lambda record: names.index(record["provider"]),
        )
    if not found:
        raise ValueError(f"{file} has no row where {where}")
    return found


def describe(record: Record, command: str, file: str) -> str:
    """Say in one line what a record was measured with."""
    command = record.get("command") or command
    commit = record["lowtide"].rpartition("+g")[2][:7]
    triton = f", Triton {record['triton']}" if record["triton"] else ""
    place = f"{record['card']}, torch {record['torch']}{triton}"
    return f"{command} · commit {commit} · {place} · {record['date'][:10]} · benchmarks/{file}"


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


class Runs:
    """Number the runs that a table's rows are of, in the order of their first number."""

    def __init__(self, file: str, command: str) -> None:
        self.file, self.command = file, command
        self.found: dict[tuple[str, str, str], tuple[int, Record]] = {}

    def number(self, record: Record) -> int:
        key = (record["lowtide"], record["date"], record.get("command") or "")
        return self.found.setdefault(key, (len(self.found) + 1, record))[0]

    def described(self) -> list[tuple[int, str, str]]:
        """Return each run's number, command, and the rest of what describes it."""
        lines = []
        for number, record in self.found.values():
            command, _, rest = describe(record, self.command, self.file).partition(" · ")
            lines.append((number, command, rest))
        return lines


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
        self.env.note_dependency(str(BENCHMARKS / file))
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
