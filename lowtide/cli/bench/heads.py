"""Implement `lowtide bench heads`: the loss on the heads of public models."""

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.bench.tables import CaseTable, Names, Out, Smoke, choose, names_option, print_tables
from lowtide.cli.shared.parameters import MOST_TOKENS, DeviceOption, picture_option, size_in_bytes
from lowtide.tools.bench.heads.data import HEADS
from lowtide.tools.bench.heads.rows import TOKENS, counted_rows, head_cases, head_providers, head_rows
from lowtide.tools.bench.heads.table import HEAD_ROWS
from lowtide.tools.environment import Device, choose_device


def heads(
    heads: Annotated[
        str | None, typer.Option(help="Heads by name, between commas.", metavar="NAMES", show_default="all")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens, between commas.",
            metavar="NUMBERS",
            show_default="256,1024,4096,16384,65536, on the CPU 256",
        ),
    ] = None,
    workspaces: Annotated[
        str,
        typer.Option(
            help="lowtide's workspaces, between commas: default, or a size such as 256MiB.", metavar="SIZES"
        ),
    ] = "default,256MiB",
    provider: Annotated[Names, names_option("An implementation, as lowtide-256MiB or eager")] = None,
    ignored: Annotated[
        float | None,
        typer.Option(
            help="The share of the tokens that is ignored. Their time is then beside that of the others "
            "alone, and there are no errors.",
            min=0,
            max=0.99,
            metavar="SHARE",
            show_default="none",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
    plot: Annotated[Path | None, picture_option("Draw the ratios, .svg or .png.")] = None,
) -> None:
    """Time the loss on the heads of public models, from GPT-2 to Kimi K2.

    Each row of the CSV is one provider on one head and number of tokens, with
    the engine that `lowtide doctor` names. Ratios are to the aligned floor: the
    three products with features and classes rounded up to multiples of 8. A
    second column has the floor of the unpadded operands, for which cuBLAS has
    slower kernels. Errors are against float64, where that takes seconds at most.
    """
    on = choose_device(device)
    chosen = choose(HEADS, heads.split(",") if heads else None, smoke, "--heads")
    counts = _counts(tokens) if tokens else TOKENS["cpu" if smoke else on]
    sizes = [None if each == "default" else size_in_bytes(each) for each in workspaces.split(",")]
    providers = choose(head_providers(sizes), provider, smoke, "--provider")
    cases = head_cases(chosen, counts, on, ignored)
    plain = None if ignored is None else counted_rows()
    measured = (row for case in cases for row in head_rows(case, providers, plain))
    table = CaseTable(cases[0].name, len(cases) * len(providers), measured)
    print_tables([table], on, smoke, out, HEAD_ROWS, plot)


def _counts(words: str) -> list[int]:
    try:
        counts = [int(word) for word in words.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1 or max(counts) > MOST_TOKENS:
        raise typer.BadParameter(f"{words!r} must be numbers from 1 to {MOST_TOKENS:,} between commas")
    return counts
