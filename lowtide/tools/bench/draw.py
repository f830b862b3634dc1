"""Draw the figure of a sweep from its CSV alone.

It has nine panels: throughput, memory and accuracy along tokens, classes, features. The panels of a
row share their vertical axis. Names stand at the right end of the row, at the height of their
line's end, or as near to it as the others allow.

Legend: N tokens, D features, V classes.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
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
VARIANTS = ("-", "--", ":", "-.")  # Line styles of the providers of one kind, which share a colour.
LABEL_POINTS = 9.5


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
                    **looks[provider],
                )
            _scale_sizes(axes, sorted({point.size for points in lines.values() for point in points}))
        row[0].set_ylabel(measure.title, fontsize=10)
        _scale_values(row[0], measure)
    for axes, axis in zip(panels[0], sweeps.lines):
        others = ", ".join(f"{LETTERS[other]} {sweeps.center[other]:,}" for other in AXES if other != axis)
        axes.set_title(f"{axis} {LETTERS[axis]}\n", fontsize=11, pad=2)
        axes.text(0, 1.03, others, transform=axes.transAxes, fontsize=9.5)
    absent = f"; did not run: {', '.join(sweeps.absent)}" if sweeps.absent else ""
    figure.supxlabel(sweeps.source + absent, fontsize=9, color="#868e96")
    figure.draw_without_rendering()  # Names are placed by the height of the laid-out panels.
    for row, measure in zip(panels, MEASURES):
        _name_lines(row, measure, sweeps, looks)


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
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _readable(size)))
    axes.tick_params("x", labelsize=9)


def _scale_values(axes: "Axes", measure: Measure) -> None:
    """Scale the vertical axis of a row's panels, whose lines are drawn."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axes.tick_params("y", labelsize=9.5)
    if not measure.ticks:
        axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(FixedLocator(measure.ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: measure.number(value)))


def _readable(size: float) -> str:
    return f"{size:.0f}" if size < 1000 else f"{size / 1000:.0f}k"


def _name_lines(row: Sequence["Axes"], measure: Measure, sweeps: Sweeps, looks: dict[str, dict]) -> None:
    """Write the names at the right of the last panel, within its height.

    The name of a provider that is not in the last panel stands at the end of its line.
    """
    *others, last = zip(row, sweeps.lines.values())
    axes = last[0]
    ends: dict[str, tuple[float, float]] = {}  # In fractions of the panel.
    for provider, points in last[1].items():
        pixels = axes.transData.transform((points[-1].size, measure.value(points[-1])))
        x, y = axes.transAxes.inverted().transform(pixels)
        ends[provider] = float(x), float(y)
    order = sorted(ends, key=lambda provider: ends[provider][1])
    gap = 1.25 * LABEL_POINTS / 72 * axes.figure.dpi / axes.bbox.height
    room = 1 - (len(order) - 1) * gap
    heights = spread([min(max(ends[name][1], i * gap), room + i * gap) for i, name in enumerate(order)], gap)
    for provider, height in zip(order, heights):
        color = looks[provider]["color"]
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 2}
        axes.annotate(
            provider,
            xy=ends[provider],
            xycoords="axes fraction",
            xytext=(1.1, height),
            textcoords="axes fraction",
            color=color,
            weight="bold" if looks[provider]["zorder"] == 3 else "normal",
            fontsize=LABEL_POINTS,
            va="center",
            arrowprops=line | {"relpos": (0, 0.5)},
        )
    named = set(order)
    for axes, lines in reversed(others):
        for provider in lines.keys() - named:
            point = lines[provider][-1]
            place, color = (point.size, measure.value(point)), looks[provider]["color"]
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.7}
            figures.label(axes, provider, place, color, (0, 6), ha="right", fontsize=LABEL_POINTS, bbox=paper)
        named |= lines.keys()


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Return the ascending places, moved as little as possible, with a gap between neighbours.

    Places that are too near move apart from their middle.
    """
    # For each group of places with the least gap: the sum of the starts that they ask for, and
    # their number.
    groups: list[list[float]] = []
    for number, place in enumerate(places):
        groups.append([place - number * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] >= groups[-1][0] / groups[-1][1]:
            total, count = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += count
    starts = [total / count for total, count in groups for _ in range(int(count))]
    return [start + number * gap for number, start in enumerate(starts)]
