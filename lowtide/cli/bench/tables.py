"""Measure, print, write and draw rows: what the commands of `lowtide bench` share."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import typer
from rich.console import Console

from lowtide.cli.shared.parameters import output_file
from lowtide.tools.bench.table import LOSS, Format, cells
from lowtide.tools.environment import Environment
from lowtide.tools.files import growing_table
from lowtide.tools.ranks import is_first


class Named(Protocol):
    @property
    def name(self) -> str: ...


NamedT = TypeVar("NamedT", bound=Named)

Names = list[str] | None
Smoke = Annotated[bool, typer.Option("--smoke", help="Run a tiny shape, and exit with 1 if a row fails.")]

Out = Annotated[
    Path | None,
    typer.Option(
        "--out", "--csv", parser=output_file, metavar="FILE", help="Write the rows to this CSV file."
    ),
]


def names_option(what: str, show_default: str = "all") -> Any:
    return typer.Option(help=f"{what} by name; repeatable.", show_default=show_default)


class CaseTable(NamedTuple):
    name: str
    total: int
    rows: Iterator[Any]  # Lazy: a row is measured, and its tensors made, when it is asked for.


def print_tables(
    tables: Sequence[CaseTable],
    device: str,
    smoke: bool,
    out: Path | None,
    form: Format = LOSS,
    plot: Path | None = None,
) -> None:
    """Measure, print the tables, and draw all rows; a smoke run exits with 1 if a row failed."""
    console = Console(quiet=not is_first())
    if not console.is_terminal:
        console.width = form.width
    environment = Environment.of(device)
    every: list[Any] = []
    with contextlib.ExitStack() as stack:
        write = None
        if out is not None and is_first():
            write = stack.enter_context(growing_table(out, form.columns))
        for table in tables:
            measured: list[Any] = []
            with console.status(table.name) as spinner:
                for row in table.rows:
                    measured.append(row)
                    if write is not None:
                        write(cells(row, environment, form))
                    spinner.update(f"{table.name}: {len(measured)} of {table.total} rows")
            console.print(form.render(measured))
            every += measured
    if smoke and any(row.failed for row in every):
        raise typer.Exit(1)
    if plot is not None and form.draw is not None:
        form.draw([cells(row, environment, form) for row in every], plot)
        console.print(f"picture: {plot}", soft_wrap=True)


def choose(known: Sequence[NamedT], names: Names, smoke: bool, option: str) -> list[NamedT]:
    """Return the entries of these names in the order given, or all of this kind of run.

    An entry without the attribute `smoke`, or with None, is of both kinds.
    """
    if not names:
        return [entry for entry in known if getattr(entry, "smoke", None) in (None, smoke)]
    by_name = {entry.name: entry for entry in known}
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(by_name)}", param_hint=option)
    return [by_name[name] for name in names]
