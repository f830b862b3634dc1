"""Show the rows of the benchmark of heads as one table, write them as a CSV, and draw the CSV.

Ratios are to the aligned floor: the three products with features and classes rounded up to
multiples of 8. The table also has the floor of the unpadded operands.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from rich.console import Group
from rich.text import Text

from lowtide.tools.bench import table
from lowtide.tools.bench.draw import Panel, draw_dots
from lowtide.tools.bench.heads.rows import HeadRow
from lowtide.tools.bench.measure import Figures
from lowtide.tools.bench.table import Format, reasons, rounded
from lowtide.tools.bench.timing import quantiles
from lowtide.tools.bench.truth import truth_dtype
from lowtide.tools.environment import dtype_name
from lowtide.tools.errors import UserError
from lowtide.tools.tables import new_table
from lowtide.tools.units import readable

FLOORS = ("aligned_floor_ms", "aligned_ratio")
COLUMNS = (
    *(*table.COLUMNS, "head", "tied", "softcap", "source", "engine", "chunks"),
    *("predicted_ratio", *FLOORS, "truth", "ignored"),
)


def record(row: HeadRow) -> dict[str, object]:
    case, head = row.case, row.case.head
    fields: dict[str, object] = {
        "head": head.name,
        "tied": head.tied,
        "softcap": head.softcap,
        "source": head.source,
        "engine": row.engine,
        "chunks": row.chunks,
        "predicted_ratio": "" if math.isnan(row.predicted_ratio) else row.predicted_ratio,
        "ignored": case.ignored,
        "truth": dtype_name(truth_dtype(case.tokens, case.features, case.classes, case.dtype)),
    }
    if row.figures is not None:
        fields |= {name: getattr(row.figures, name) for name in FLOORS}
    return table.record(row) | rounded(fields)


def render(rows: Sequence[HeadRow]) -> Group:
    """Return a line for each head and number of tokens, with a cell for each provider."""
    ran = [row for row in rows if row.figures is not None]
    providers = list(dict.fromkeys(row.provider.name for row in ran))
    shown = new_table(
        "ratio to the aligned floor, time; peak beyond gradients, larger error of dX and dW",
        caption="bold*: the best; floor: of features and classes rounded up to 8, and as they are; "
        "of counted: over the time of the tokens alone that are not ignored, with --ignored",
    )
    for heading in ("head", "D x V", "N", "floor ms", "engine", *providers):
        shown.add_column(heading, no_wrap=True)
    for case, rows_of_case in groupby(ran, lambda row: row.case):  # in the order of the cases
        of_case = list(rows_of_case)
        best = min(of_case, key=lambda row: _figures(row).aligned_ratio)
        cells = {row.provider.name: _cell(_figures(row), row is best) for row in of_case}
        engines = dict.fromkeys(row.engine for row in of_case if row.engine)
        shown.add_row(
            *(case.head.name, f"{case.features} x {case.classes}", f"{case.tokens}"),
            "\n".join(f"{_floor(of_case, name):.3g}" for name in ("aligned_floor_ms", "floor_ms")),
            "\n".join(engines),
            *(cells.get(name, "-") for name in providers),
        )
    return Group(shown, *reasons(rows))


def _figures(row: HeadRow) -> Figures:
    assert row.figures is not None
    return row.figures


def _floor(rows: Iterable[HeadRow], name: str) -> float:
    """Return the median of the floor's times; it was timed in turn with each provider."""
    return quantiles([getattr(row.figures, name) for row in rows], 0.5)[0]


def _cell(own: Figures, best: bool) -> Text:
    ratio = Text(f"{own.aligned_ratio:.2f}{'*' if best else ''}", "bold" if best else "")
    peak = readable(own.peak_bytes, ".1f")
    last = (
        f"{1 + own.over_plain:.2f} of counted" if own.over_plain is not None else f"{max(own.errors[1:]):.0e}"
    )
    return Text.assemble(ratio, f" {own.ms:.3g} ms\n{peak} {last}")


def draw(records: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw each provider's ratio to the aligned floor over the heads, a panel for each token count.

    Records are those of the CSV.
    """
    ran = [record for record in records if record["status"] == "ok"]
    if not ran:
        raise UserError("no provider ran, and there is nothing to draw")
    sizes = {record["head"]: (int(record["features"]), int(record["classes"])) for record in ran}
    heads = sorted(sizes, key=lambda head: (*sizes[head], head))
    panels: dict[int, Panel] = {}
    for record in sorted(ran, key=lambda record: int(record["tokens"])):
        tokens = int(record["tokens"])
        dots = panels.setdefault(tokens, Panel(f"N = {tokens:,}", {})).dots
        place = heads.index(record["head"]), float(record["aligned_ratio"])
        dots.setdefault(record["provider"], []).append(place)
    title = "Forward and backward over three products, operands rounded up to 8"
    draw_dots(list(panels.values()), heads, title, ran, path)


HEAD_ROWS = Format(COLUMNS, record, render, 200, draw)
