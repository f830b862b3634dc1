"""Measure the shapes of public models, show the rows as one table and a CSV, and draw its records.

Ratios of times and of peak memory are to those of the quickest of torch's own kernels on the case,
forward and backward together.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group
from rich.text import Text

from lowtide.tools.bench.attention import table
from lowtide.tools.bench.attention.providers import AttentionProvider
from lowtide.tools.bench.attention.real import RealCase
from lowtide.tools.bench.attention.rows import AttentionFigures, AttentionRow, attention_rows
from lowtide.tools.bench.attention.truth import truth_dtype
from lowtide.tools.bench.draw import Panel, draw_dots
from lowtide.tools.bench.measure import SWEEP_BUDGET_MS
from lowtide.tools.bench.table import Format, reasons, rounded
from lowtide.tools.environment import dtype_name
from lowtide.tools.errors import UserError
from lowtide.tools.tables import new_table
from lowtide.tools.units import readable

TORCH = ("sdpa", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "varlen")
REAL_PROVIDERS = ("lowtide", *TORCH, "xformers", "flash-attn")
RATIOS = ("forward_over_torch", "backward_over_torch", "peak_over_torch")
COLUMNS = (*table.COLUMNS, "model", "source", "checked", "truth", "best_of_torch", *RATIOS)


@dataclass(frozen=True)
class RealRow(AttentionRow):
    case: RealCase
    best: AttentionRow | None = None  # The quickest of torch's own kernels.

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Return the times of forward and backward and the peak, over those of the best."""
        own, other = self.figures, self.best.figures if self.best else None
        if own is None or other is None:
            return (None, None, None)
        backward = own.backward.ms / other.backward.ms if own.backward and other.backward else None
        peak = own.peak_bytes / other.peak_bytes if other.peak_bytes else None
        return own.forward.ms / other.forward.ms, backward, peak


def real_rows(case: RealCase, providers: Iterable[AttentionProvider]) -> Iterator[RealRow]:
    found = list(attention_rows(case, providers, SWEEP_BUDGET_MS))
    torchs = [row for row in found if row.figures is not None and row.provider.name in TORCH]
    best = min(torchs, key=lambda row: _figures(row).ms, default=None)
    yield from (RealRow(**vars(row), best=best) for row in found)


def _figures(row: AttentionRow) -> AttentionFigures:
    assert row.figures is not None
    return row.figures


def record(row: RealRow) -> dict[str, object]:
    case = row.case
    fields: dict[str, object] = {
        "model": case.model.name,
        "source": case.model.source,
        "checked": case.model.checked,
        "truth": dtype_name(truth_dtype(case)),
        "best_of_torch": row.best.provider.name if row.best else "",
    }
    return table.record(row) | rounded(fields | dict(zip(RATIOS, row.ratios)))


def render(rows: Sequence[RealRow]) -> Group:
    """Return a line for each case, with a cell for each provider; of torch's the quickest."""
    ran = [row for row in rows if row.figures is not None]
    shown = new_table(
        "forward / backward: ratio of times to torch's quickest kernel, ms, peak beyond gradients,"
        " largest error, host us",
        caption="* quicker than torch in both passes",
    )
    others = [name for name in dict.fromkeys(row.provider.name for row in ran) if name not in TORCH]
    for heading in ("case", "shape", "way of lowtide", "torch", *others):
        shown.add_column(heading, no_wrap=heading not in ("shape", "way of lowtide"))
    for case in dict.fromkeys(row.case for row in ran):
        of_case = {row.provider.name: row for row in ran if row.case is case}
        best = next(iter(of_case.values())).best
        cells = [_cell(of_case[name]) if name in of_case else Text("-") for name in others]
        shown.add_row(
            Text(case.name),
            Text(f"{case.sizes} {dtype_name(case.dtype)}\n{case.options}"),
            Text(of_case["lowtide"].engine if "lowtide" in of_case else ""),
            Text("-") if best is None else Text(f"{best.provider.name}\n{_absolute(_figures(best))}"),
            *cells,
        )
    return Group(shown, *reasons(rows))


def _cell(row: RealRow) -> Text:
    passes = [ratio for ratio in row.ratios[:2] if ratio is not None]
    quicker = bool(passes) and max(passes) < 1
    ratios = " / ".join(f"{ratio:.2f}" for ratio in passes) + ("*" if quicker else "")
    return Text.assemble(Text(ratios, "bold" if quicker else ""), f"\n{_absolute(_figures(row))}")


def _absolute(own: AttentionFigures) -> str:
    times = [own.forward.ms, *([own.backward.ms] if own.backward else [])]
    error = f" {max(own.errors):.0e}" if own.errors else ""
    lines = [" / ".join(f"{ms:.3g}" for ms in times) + " ms", f"{readable(own.peak_bytes, '.1f')}{error}"]
    if own.host_us:
        lines.append(" / ".join(f"{us:.0f}" for us in own.host_us) + " us")
    return "\n".join(lines)


def draw(records: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw what each provider takes over torch's quickest kernel: time of both passes, memory.

    Records are those of the CSV.
    """
    ran = [record for record in records if record["status"] == "ok" and record["best_of_torch"]]
    if not ran:
        raise UserError("no provider ran beside one of torch's kernels, and there is nothing to draw")
    cases = list(dict.fromkeys(record["case"] for record in ran))
    panels = [Panel(label, {}) for label in ("forward", "backward", "peak memory")]
    for record in ran:
        if record["provider"] in TORCH:
            continue
        for panel, name in zip(panels, RATIOS):
            if float(record[name] or 0):
                dots = panel.dots.setdefault(record["provider"], [])
                dots.append((cases.index(record["case"]), float(record[name])))
    title = "Attention of public models: time and memory over those of torch's quickest kernel"
    draw_dots(panels, cases, title, ran, path)


REAL_ROWS = Format(COLUMNS, record, render, 200, draw)
