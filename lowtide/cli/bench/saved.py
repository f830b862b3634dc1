"""Implement `lowtide bench draw` and `compare`, which read rows that were measured before."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from lowtide.cli.shared.parameters import picture_option
from lowtide.tools import files
from lowtide.tools.bench import compare as comparing
from lowtide.tools.bench import draw as sweep
from lowtide.tools.bench.attention import real_table
from lowtide.tools.bench.heads import table as heads
from lowtide.tools.tables import new_table

RATIOS = {  # The columns that a file must have; the first tells it from others.
    "heads": (("head", *heads.FLOORS), heads.draw),
    "attention": (("best_of_torch", *real_table.RATIOS), real_table.draw),
}


def draw(
    rows: Annotated[
        Path, typer.Argument(help="A CSV of `linear-cross-entropy --sweep`, `heads` or `attention --real`.")
    ],
    out: Annotated[Path, picture_option("The figure, .svg or .png.")],
) -> None:
    """Draw a CSV of measured rows, from the file alone.

    Of a sweep: throughput, memory and accuracy along each axis. Of heads and of
    public models' attention: the ratios that their tables are of.
    """
    draw_figure(rows, out)
    Console().print(f"figure: {out}", soft_wrap=True)


def draw_figure(path: Path, out: Path) -> None:
    """Draw the CSV at `path`; the same file gives the same picture."""
    with open(path, encoding="utf-8", errors="replace") as file:
        columns = file.readline().strip().split(",")
    for kind, (own, draw_records) in RATIOS.items():
        if own[0] in columns:
            needed = (*own, "card", "torch", "dtype", "lowtide", "provider", "status")
            draw_records(files.read_table(path, needed, kind), out)
            return
    sweep.draw(path, out)


def compare(
    before: Annotated[Path, typer.Argument(help="A CSV of `lowtide bench`.")],
    after: Annotated[Path, typer.Argument(help="Another of the same command.")],
    percent: Annotated[float, typer.Option(min=0, help="The change that is allowed.")] = 2.0,
) -> None:
    """Compare times, ratios and memory of two CSVs, and exit with 1 if one has changed.

    Rows are compared that agree in case, sizes, dtype, options and provider. A
    row that only one file has, or that ran in one alone, is a change too.
    Ratios are to a floor timed in the same run: they depend less on clocks
    than times do.
    """
    found = comparing.compare(before, after)
    changed = found.beyond(percent)
    console = Console(highlight=False)
    for line in found.surroundings:
        console.print(Text(line), soft_wrap=True)
    if changed:
        table = new_table(None, ("row", "figure"), ("before", "after", "change"))
        for one in changed:
            figures = (f"{one.before:,.6g}", f"{one.after:,.6g}", f"{one.percent:+.1f} %")
            table.add_row(Text(one.row), one.figure, *figures)
        console.print(table)
    for line in found.unmatched:
        console.print(Text(line), soft_wrap=True)
    of = f"{len(changed)} of {len(found.changes)} figures changed by more than {percent:g} %"
    console.print(of + f", {len(found.unmatched)} rows without a counterpart" * bool(found.unmatched))
    raise typer.Exit(int(bool(changed or found.unmatched)))
