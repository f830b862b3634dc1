"""Draw the figures of the benchmarks from their CSVs alone: of a sweep, and of ratios.

That of a sweep has nine panels: throughput, memory and accuracy along tokens, classes, features.
The panels of a row share their vertical axis. Ratios of many cases are dots, in a panel for each
measure, with a colour for each provider. Names stand above the panels.

Legend: N tokens, D features, V classes.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lowtide.tools import figures, files
from lowtide.tools.bench.cases import AXES
from lowtide.tools.errors import UserError
from lowtide.tools.units import readable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LETTERS = {"tokens": "N", "features": "D", "classes": "V"}
MEASURED = ("ms", "peak_bytes", "grad_input_error", "grad_weight_error")
COLUMNS = (
    *("case", "mode", "provider", "status", "card", "torch", "lowtide", "dtype", *AXES),
    *(*MEASURED, "loss_error"),
)
NAMES_BESIDE = 4
# Line styles of the providers of one kind, which share a colour.
VARIANTS = ("-", "--", ":", "-.", (0, (1, 3)), (0, (6, 1, 1, 1, 1, 1)))


class Point(NamedTuple):
    size: int
    throughput: float  # TFLOP/s
    memory: float  # bytes
    error: float


@dataclass(frozen=True)
class Sweeps:
    center: dict[str, int]  # The size along each axis.
    lines: dict[str, dict[str, list[Point]]]  # Points by axis and provider, in order of size.
    absent: list[str]  # Providers without a point.
    source: str


class Measure(NamedTuple):
    title: str
    value: Callable[[Point], float]
    ticks: Sequence[float]  # Ticks of a logarithmic axis; empty for an axis that begins at 0.
    number: Callable[[float], str]


MEASURES = (
    Measure("TFLOP/s\nof 6 N D V", lambda point: point.throughput, (), lambda speed: f"{speed:g}"),
    Measure(
        "peak memory\nbeyond inputs and gradients",
        lambda point: point.memory,
        [2.0**power for power in range(0, 60, 4)],
        lambda size: readable(size, ".0f"),
    ),
    Measure(
        "relative error\nof dX or dW, the larger",
        lambda point: point.error,
        [digit * 10.0**power for power in range(-16, 1) for digit in (1, 2, 5)],
        lambda error: f"{error:.0e}".replace("e-0", "e-"),
    ),
)


def draw(path: Path, out: Path) -> None:
    sweeps = read(path)
    with figures.figure(10, 9.2) as figure:
        draw_sweeps(figure, sweeps)
        figures.save(figure, out)


def read(path: Path) -> Sweeps:
    rows = files.read_table(path, COLUMNS, "a sweep")
    # Shapes off the center are named after it and their axis.
    names = [re.fullmatch(rf"(.+)-({'|'.join(AXES)})-\d+", row["case"]) for row in rows]
    centers = {name[1] for name in names if name}
    if len(centers) != 1:
        found = "none" if not centers else ", ".join(sorted(centers))
        raise UserError(f"{path} must hold the sweeps around one shape, and holds: {found}")
    modes = {row["mode"] for row in rows}
    if modes != {"step"}:
        raise UserError(f"{path} must hold steps, loss and gradients, and holds: {', '.join(sorted(modes))}")
    (center,) = centers
    axes: dict[str, dict[str, list[Point]]] = {name[2]: {} for name in names if name}
    sizes: dict[str, int] = {}
    try:
        for row, name in zip(rows, names):
            if name is None and row["case"] != center:
                continue
            if name is None:
                sizes = {axis: int(row[axis]) for axis in AXES}
            for axis in [name[2]] if name else axes:
                points = axes[axis].setdefault(row["provider"], [])
                if row["status"] == "ok":
                    points.append(_point(row, axis))
    except ValueError as problem:
        raise UserError(f"{path}: {problem}") from problem
    if not sizes:
        raise UserError(f"{path} has no row of the case {center!r}, the center of its sweeps")
    lines = {
        axis: {provider: sorted(points) for provider, points in axes[axis].items() if points}
        for axis in AXES
        if axis in axes
    }
    there = {provider for each in lines.values() for provider in each}
    absent = [name for name in dict.fromkeys(row["provider"] for row in rows) if name not in there]
    first = rows[0]
    source = f"{first['card']}, torch {first['torch']}, {first['dtype']}, lowtide {first['lowtide']}"
    return Sweeps(sizes, lines, absent, source)


def _point(row: dict[str, str], axis: str) -> Point:
    N, D, V = (int(row[name]) for name in ("tokens", "features", "classes"))
    ms, peak, *errors = (float(row[name]) for name in MEASURED)
    if not (min(N, D, V) > 0 and ms > 0 and all(0 <= each < math.inf for each in (ms, peak, *errors))):
        raise ValueError(f"a row of {row['provider']} on {row['case']} has a number that is out of range")
    return Point(int(row[axis]), 6e-9 * N * D * V / ms, peak, max(errors))


def draw_sweeps(figure: "Figure", sweeps: Sweeps) -> None:
    panels = figure.subplots(len(MEASURES), len(sweeps.lines), sharex="col", sharey="row", squeeze=False)
    looks = looks_of(name for lines in sweeps.lines.values() for name in lines)
    for row, measure in zip(panels, MEASURES):
        for axes, lines in zip(row, sweeps.lines.values()):
            for provider, points in lines.items():
                axes.plot(
                    [point.size for point in points],
                    [measure.value(point) for point in points],
                    label=provider,
                    **looks[provider],
                )
            _scale_sizes(axes, sorted({point.size for points in lines.values() for point in points}))
        row[0].set_ylabel(measure.title, fontsize=10)
        _scale_values(row[0], measure)
    for axes, axis in zip(panels[0], sweeps.lines):
        others = ", ".join(f"{LETTERS[other]} {sweeps.center[other]:,}" for other in AXES if other != axis)
        axes.set_title(f"{axis} {LETTERS[axis]}", fontsize=11, pad=18)
        axes.text(0, 1.03, others, transform=axes.transAxes, fontsize=9.5)
    absent = f"; did not run: {', '.join(sweeps.absent)}" if sweeps.absent else ""
    figure.supxlabel(sweeps.source + absent, fontsize=9, color="#868e96")
    named = {line.get_label(): line for axes in panels.flat for line in axes.lines}
    figure.legend(
        handles=[named[provider] for provider in looks],
        loc="outside upper center",
        ncols=NAMES_BESIDE,
        frameon=False,
        handlelength=2.8,
        labelcolor="linecolor",
    )


def looks_of(providers: Iterable[str]) -> dict[str, dict]:
    """Return colour and dashes of each provider.

    A variant ("lowtide-256MiB") has the colour of its kind.
    """
    looks: dict[str, dict] = {}
    variants: dict[str, int] = {}
    for provider in dict.fromkeys(providers):
        kinds = [kind for kind in figures.COLORS if provider == kind or provider.startswith(f"{kind}-")]
        kind = max(kinds, key=len, default="")
        number = variants[kind] = variants.get(kind, -1) + 1
        ours = kind == "lowtide"
        looks[provider] = {
            "color": figures.COLORS.get(kind, figures.INK),
            "linestyle": VARIANTS[number % len(VARIANTS)],
            "linewidth": 2.2 if ours else 1.4,
            "zorder": 3 if ours else 2,
            "marker": "o",
            "markersize": 3.5 if ours else 2.5,
        }
    return looks


def _scale_sizes(axes: "Axes", sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [_readable(size) for size in sizes], fontsize=9)
    axes.minorticks_off()


def _scale_values(axes: "Axes", measure: Measure) -> None:
    """Scale the vertical axis of a row's panels, whose lines are drawn."""
    from matplotlib.ticker import FixedLocator

    axes.tick_params("y", labelsize=9.5)
    if not measure.ticks:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(measure.ticks))
    axes.yaxis.set_major_formatter(lambda value, _: measure.number(value))
    axes.minorticks_off()


def _readable(size: float) -> str:
    return f"{size:.0f}" if size < 1000 else f"{size / 1000:.0f}k"


class Panel(NamedTuple):
    label: str
    dots: dict[str, list[tuple[int, float]]]
    """Holds the place and the ratio of each case, by provider."""


def draw_dots(
    panels: Sequence[Panel],
    cases: Sequence[str],
    title: str,
    records: Sequence[Mapping[str, str]],
    path: Path,
) -> None:
    """Draw the panels above each other; card, versions and dtypes below them are the records'."""
    looks = looks_of(name for panel in panels for name in panel.dots)
    with figures.figure(14, 3 + 2.2 * len(panels)) as figure:
        axes: list[Axes] = [*figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]]
        for one, panel in zip(axes, panels):
            _draw_panel(one, panel, looks)
        axes[0].set_title(title)
        axes[-1].set_xticks(range(len(cases)), cases, rotation=90)
        figures.names_above(axes[0])
        card, torch, dtype, lowtide = (
            " and ".join(dict.fromkeys(record[name] for record in records))
            for name in ("card", "torch", "dtype", "lowtide")
        )
        source = f"{card}, torch {torch}, {dtype}, lowtide {lowtide}"
        figure.supxlabel(source, fontsize=9, color="#868e96")
        figures.save(figure, path)


def _draw_panel(axes: "Axes", panel: Panel, looks: dict[str, dict]) -> None:
    axes.axhline(1, color=figures.INK, linewidth=0.8)
    for name, look in looks.items():
        if panel.dots.get(name):
            hollow = look["linestyle"] != "-"  # A variant of its kind.
            axes.plot(
                *zip(*panel.dots[name]),
                linestyle="",
                label=name,
                fillstyle="none" if hollow else "full",
                **{key: look[key] for key in ("color", "marker", "zorder")},
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel(panel.label)
