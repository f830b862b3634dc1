"""`lowtide bench`: time, memory and error of lowtide beside torch and the peers that are installed."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import typer
from rich.console import Console

from lowtide.bench.cases import CASES, Case
from lowtide.bench.measure import Mode, Row, rows
from lowtide.bench.providers import PROVIDERS, Provider
from lowtide.bench.table import CsvWriter, Environment, render

Entry = TypeVar("Entry", Case, Provider)

app = typer.Typer(no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure lowtide beside torch and the peers that are installed."""


@app.command("linear-cross-entropy")
def linear_cross_entropy(
    case: Annotated[
        list[str] | None, typer.Option(help="A shape by name; repeatable.", show_default="all of the device")
    ] = None,
    provider: Annotated[
        list[str] | None, typer.Option(help="An implementation by name; repeatable.", show_default="all")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="Loss and gradients, or the loss alone.")] = Mode.STEP,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda.", show_default="cuda where there is one")
    ] = None,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a tiny shape, and exit with 1 if a provider fails.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this CSV file.", dir_okay=False)] = None,
) -> None:
    """Time fused linear + cross-entropy against its floor, the matrix products of every exact method.

    Each row is one provider on one case: its median time, the ratio to the
    floor timed in turn with it, its peak memory beyond inputs, loss and
    gradients, and its errors against products in a wider dtype.
    """
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    device = device or devices[0]
    if device not in devices:
        raise typer.BadParameter(f"{device!r} is not one of {', '.join(devices)}", param_hint="--device")
    cases = _choose([one for one in CASES if one.device == device], case, smoke, "--case")
    providers = _choose(PROVIDERS, provider, smoke, "--provider")
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a file has no width, and rows should not be wrapped in it
    failed = False
    with contextlib.ExitStack() as stack:
        writer = None
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            writer = CsvWriter(stack.enter_context(out.open("w", newline="")), Environment.of(device))
        for one_case in cases:
            measured: list[Row] = []
            with console.status(one_case.name) as spinner:
                for row in rows(one_case, providers, mode):
                    measured.append(row)
                    if writer is not None:
                        writer.write(row)
                    spinner.update(f"{one_case.name}: {len(measured)} of {len(providers)} providers")
            console.print(render(measured))
            failed |= any(row.failed for row in measured)
    raise typer.Exit(int(smoke and failed))


def _choose(known: Sequence[Entry], names: list[str] | None, smoke: bool, option: str) -> list[Entry]:
    """The entries of these names in the order asked for, or all that belong to this kind of run."""
    if not names:
        return [entry for entry in known if entry.smoke in (None, smoke)]
    by_name = {entry.name: entry for entry in known}
    for name in names:
        if name not in by_name:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(by_name)}", param_hint=option)
    return [by_name[name] for name in names]
