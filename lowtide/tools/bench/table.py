"""Show rows of the benchmark as a table, and write them as a CSV with their origin."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group
from rich.text import Text

from lowtide.tools.bench.measure import Row
from lowtide.tools.environment import ENVIRONMENT, Environment, dtype_name, version
from lowtide.tools.tables import new_table

TIMES = ("ms", "ms_p20", "ms_p80", "floor_ms", "ratio")
PLAIN = ("plain_ms", "over_plain")
ERRORS = ("loss_error", "grad_input_error", "grad_weight_error")
COLUMNS = (
    *ENVIRONMENT,
    *("case", "tokens", "features", "classes", "dtype", "mode"),
    *("provider", "version", "status", "reason"),
    *(*TIMES, "peak_bytes", *ERRORS),
    *("workspace", *PLAIN),
    *("logits", "largest_logit"),
)


class Format(NamedTuple):
    """Define how the rows of one command are shown and written."""

    columns: Sequence[str]
    record: Callable[[Any], dict[str, object]]
    render: Callable[[Any], Group]
    width: int = 120
    """Columns of the output if it goes to a file, since a file has no width."""
    draw: Callable[[Sequence[Mapping[str, str]], Path], None] | None = None
    """Draw the records of a CSV to a file."""


def cells(row: Any, environment: Environment, form: Format) -> dict[str, str]:
    """Return the row as a reader of its CSV would: every cell is a string."""
    found = dict.fromkeys(form.columns) | asdict(environment) | form.record(row)
    return {name: "" if value is None else str(value) for name, value in found.items()}


def record(row: Row) -> dict[str, object]:
    case, figures = row.case, row.figures
    fields: dict[str, object] = {
        "case": case.name,
        "tokens": case.tokens,
        "features": case.features,
        "classes": case.classes,
        "dtype": dtype_name(case.dtype),
        "mode": row.mode.value,
        "workspace": row.provider.workspace,
        "logits": case.logits,
        "largest_logit": case.largest_logit,
        **outcome(row),
    }
    if figures is not None:
        fields |= {name: getattr(figures, name) for name in (*TIMES, *PLAIN)}
        fields["peak_bytes"] = figures.peak_bytes
        fields |= zip(ERRORS, figures.errors)
    return rounded(fields)


def outcome(row: Any) -> dict[str, str]:
    """Return the columns of a provider, and of whether it ran."""
    return {
        "provider": row.provider.name,
        "version": version(row.provider.distribution),
        "status": status(row),
        "reason": row.reason,
    }


def rounded(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in fields.items()}


def status(row: Any) -> str:
    if row.figures is not None:
        return "ok"
    return "failed" if row.failed else "unavailable"


def render(rows: Sequence[Row]) -> Group:
    """Return the table of one case, with the providers that did not run and their reasons below."""
    case, mode = rows[0].case, rows[0].mode
    title = f"{case.name}: {case.shape}, {mode.value}"
    if case.largest_logit is not None:
        title += f", {case.logits} logits up to {case.largest_logit:.1f}"
    # Options are timed beside the plain loss, and have no errors.
    options = any(row.figures and row.figures.plain_ms for row in rows)
    own = ("plain", "over plain") if options else ("loss err", "dX err", "dW err")
    names = ["option" if options else "provider"]
    table = new_table(title, names, ("ms", "p20-p80", "floor", "ratio", "peak MiB", *own))
    for row in rows:
        if (figures := row.figures) is not None:
            plain, over = figures.plain_ms, figures.over_plain
            table.add_row(
                row.provider.name,
                f"{figures.ms:.2f}",
                f"{figures.ms_p20:.2f}-{figures.ms_p80:.2f}",
                f"{figures.floor_ms:.2f}",
                f"{figures.ratio:.2f}",
                f"{figures.peak_bytes / 2**20:.1f}",
                *([] if plain is None or over is None else [f"{plain:.2f}", f"{100 * over:+.1f} %"]),
                *(f"{error:.0e}" for error in figures.errors),
            )
    return Group(table, *reasons(rows))


def reasons(rows: Iterable[Any]) -> list[Text]:
    """Return a line for each provider and reason why it did not run, with its cases if several."""
    cases: dict[str, list[str]] = {}
    for row in rows:
        if row.figures is None:
            said = f"  {row.provider.name} {status(row)}: {row.reason}"
            cases.setdefault(said, []).append(row.case.name)
    # Text, because brackets in a reason would be markup.
    return [Text(f"{said} ({', '.join(of)})" if len(of) > 1 else said) for said, of in cases.items()]


LOSS = Format(COLUMNS, record, render)
