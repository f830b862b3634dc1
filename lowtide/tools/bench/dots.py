"""Draw ratios of many cases as dots: a panel for each measure, a colour for each provider."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lowtide.tools import figures
from lowtide.tools.bench.draw import looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Panel(NamedTuple):
    label: str
    dots: dict[str, list[tuple[int, float]]]
    """By provider: the place of a case, and its ratio."""


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
