"""Implement `lowtide bench attention`, of chosen shapes and of those of public models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.bench.tables import CaseTable, Names, Out, Smoke, choose, names_option, print_tables
from lowtide.cli.shared.parameters import DeviceOption, picture_option
from lowtide.tools.bench.attention.cases import ATTENTION_CASES
from lowtide.tools.bench.attention.providers import ATTENTION_PROVIDERS
from lowtide.tools.bench.attention.real import RealCase, real_cases
from lowtide.tools.bench.attention.real_table import REAL_PROVIDERS, REAL_ROWS, real_rows
from lowtide.tools.bench.attention.rows import attention_rows
from lowtide.tools.bench.attention.table import ATTENTION
from lowtide.tools.environment import Device, choose_device


def attention(
    case: Annotated[Names, names_option("A shape", "all of the device but the longest")] = None,
    provider: Annotated[Names, names_option("An implementation")] = None,
    real: Annotated[bool, typer.Option("--real", help="Shapes of public models, in one table.")] = False,
    flex: Annotated[
        str | None,
        typer.Option(
            help="With --real: time FlexAttention on these shapes, between commas, or on all. "
            "It compiles for 10 to 20 seconds each.",
            metavar="NAMES",
            show_default="none",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    smoke: Smoke = False,
    out: Out = None,
    plot: Annotated[Path | None, picture_option("With --real: draw the ratios, .svg or .png.")] = None,
) -> None:
    """Time attention, forward and backward, beside torch's own and the peers.

    Each row is one provider on one case: its times, its rates, what they are of
    the best peer's (forward, backward, both together), its peak memory beyond
    inputs, result and gradients, and its errors against products in a wider
    dtype. The providers of a case take turns. The cases million, half-million
    and quarter-million run by name only.

    With --real, cases are the shapes and options of public models, from Swin to
    Llama 3. Ratios are to the quickest of torch's own kernels, and the rows say
    which way lowtide takes and how long each pass takes the host.
    """
    on = choose_device(device)
    if real:
        _real(choose(real_cases(on), case, smoke, "--case"), provider, flex, on, smoke, out, plot)
        return
    for name, value in (("--flex", flex), ("--plot", plot)):
        if value is not None:
            raise typer.BadParameter("goes together with --real", param_hint=name)
    known = [one for one in ATTENTION_CASES if one.device == on and (case or not one.by_name)]
    cases = choose(known, case, smoke, "--case")
    chosen = choose(ATTENTION_PROVIDERS, provider, smoke, "--provider")
    tables = []
    for one in cases:
        providers = [each for each in chosen if provider or each.name not in one.without]
        tables.append(CaseTable(one.name, len(providers), attention_rows(one, providers)))
    print_tables(tables, on, smoke, out, ATTENTION)


def _real(
    cases: Sequence[RealCase],
    provider: Names,
    flex: str | None,
    device: str,
    smoke: bool,
    out: Path | None,
    plot: Path | None,
) -> None:
    chosen = choose(ATTENTION_PROVIDERS, provider or list(REAL_PROVIDERS), smoke, "--provider")
    compiled = choose(ATTENTION_PROVIDERS, ["flex"], smoke, "--provider")
    of_flex = cases if flex == "all" else choose(cases, flex.split(","), smoke, "--flex") if flex else []
    measured = (
        row for one in cases for row in real_rows(one, [*chosen, *(compiled if one in of_flex else [])])
    )
    total = len(cases) * len(chosen) + len(of_flex)
    print_tables([CaseTable(cases[0].name, total, measured)], device, smoke, out, REAL_ROWS, plot)
