"""Show the rows of attention's benchmark as tables, and write them as records."""

from collections.abc import Sequence

from rich.console import Group

from lowtide.tools.bench.attention.rows import AttentionFigures, AttentionRow, Pass
from lowtide.tools.bench.table import Format, outcome, reasons, rounded
from lowtide.tools.environment import ENVIRONMENT, dtype_name
from lowtide.tools.tables import new_table

PASS = ("ms", "ms_p20", "ms_p80", "tflops", "ratio")
HOST = ("forward_host_us", "backward_host_us")
ERRORS = (
    *("out_error", "grad_query_error", "grad_key_error", "grad_value_error", "grad_bias_error"),
    "grad_sink_error",
)
COLUMNS = (
    *ENVIRONMENT,
    *("case", "batches", "heads", "key_heads", "queries", "features", "dtype", "options"),
    *("provider", "version", "engine", "status", "reason"),
    *(f"{name}_{field}" for name in ("forward", "backward") for field in PASS),
    *("step_ratio", "peak_bytes", *ERRORS),
    *("keys", "value_features", "way", *HOST),
)


def record(row: AttentionRow) -> dict[str, object]:
    case, figures = row.case, row.figures
    fields: dict[str, object] = {
        "case": case.name,
        "batches": case.B,
        "heads": case.H,
        "key_heads": case.key_heads,
        "queries": case.M,
        "keys": case.keys,
        "value_features": case.value_features,
        "features": case.K,
        "dtype": dtype_name(case.dtype),
        "options": case.options,
        "engine": row.engine,
        "way": row.way,
        **outcome(row),
    }
    if figures is not None:
        for name, own in (("forward", figures.forward), ("backward", figures.backward)):
            if own is not None:
                fields |= {f"{name}_{field}": getattr(own, field) for field in PASS}
        fields |= {"step_ratio": figures.step_ratio, "peak_bytes": figures.peak_bytes}
        fields |= zip((f"{name}_error" for name in case.results), figures.errors)
        fields |= zip(HOST, figures.host_us)
    return rounded(fields)


def render(rows: Sequence[AttentionRow]) -> Group:
    """Return the table of one case, with the providers that did not run and their reasons below."""
    case = rows[0].case
    rates = ("fwd ms", "bwd ms", "fwd TFLOP/s", "bwd TFLOP/s", "of best peer")
    headings = (*rates, "peak MiB", "out err", "grad err")
    table = new_table(f"{case.name}: {case.shape}", ["provider"], headings)
    for row in rows:
        if row.figures is not None:
            ran = f" ({row.engine})" if row.engine and not row.provider.name.endswith(row.engine) else ""
            table.add_row(row.provider.name + ran, *_cells(row.figures))
    return Group(table, *reasons(rows))


def _cells(figures: AttentionFigures) -> list[str]:
    passes = (figures.forward, figures.backward)
    ratios = (*(each.ratio if each else None for each in passes), figures.step_ratio)
    out, *gradients = figures.errors or (None,)
    return [
        *("-" if each is None else f"{each.ms:.3g}" for each in passes),
        *("-" if each is None else _rate(each) for each in passes),
        " ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        f"{figures.peak_bytes / 2**20:.1f}",
        *("-" if error is None else f"{error:.0e}" for error in (out, max(gradients, default=None))),
    ]


def _rate(one: Pass) -> str:
    return f"{one.tflops:.0f}" if one.tflops >= 10 else f"{one.tflops:.2g}"


ATTENTION = Format(COLUMNS, record, render)
