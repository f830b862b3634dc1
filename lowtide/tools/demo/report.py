"""Compare runs by a table, and by a figure of the loss and of the loss step's memory.

Of two runs the first is ours, with lowtide's loss or on several ranks. The other is what it is
compared with, with eager logits or in one process.
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from lowtide.tools import figures
from lowtide.tools.demo.loop import Run
from lowtide.tools.figures import COLORS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIR = COLORS["eager"], COLORS["lowtide"]  # colours of the two losses compared


def seconds_per_step(run: Run) -> float:
    """Return the median of the steps without a measured memory, because measuring takes time."""
    clean = [step.seconds for step in run.history if step.peak_bytes is None]
    return statistics.median(clean or [step.seconds for step in run.history])


def peak_bytes(run: Run) -> int:
    return max(step.peak_bytes or 0 for step in run.history)


def names(runs: list[Run]) -> list[str]:
    """Return what the runs are called: by their losses, or by their ranks where these differ."""
    if not any(run.config.parallel for run in runs):
        return [run.config.loss for run in runs]
    return [run.config.ranks_name for run in runs]


def readable(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def table(runs: list[Run]) -> Table:
    """Return a row for each run; for two also the losses' difference and the ratio of the rest."""
    parallel = runs[0].config.parallel
    where = " on a rank" if parallel else ""
    caption = f"peak: the most that head and loss hold at once{where}, with their gradients"
    called = names(runs)
    if len(runs) == 2:
        first, second = called
        caption += f"\nlast row: how far the losses are apart; time and peak of {second} over {first}"
    summary = Table(caption=caption)
    summary.add_column(parallel.value if parallel else "loss")
    for column in ("final loss", "validation", "step", "tokens/s", "peak"):
        summary.add_column(column, justify="right")
    for run, name in zip(runs, called):
        seconds = seconds_per_step(run)
        summary.add_row(
            name,
            f"{run.history[-1].loss:.6f}",
            f"{run.validation_loss:.6f}",
            f"{seconds * 1000:,.0f} ms",
            f"{run.config.tokens_per_step / seconds:,.0f}",
            readable(peak_bytes(run)),
        )
    if len(runs) == 2:
        ours, other = runs
        summary.add_section()
        summary.add_row(
            f"{second} vs {first}",
            f"{abs(other.history[-1].loss - ours.history[-1].loss):.1e}",
            f"{abs(other.validation_loss - ours.validation_loss):.1e}",
            f"{seconds_per_step(other) / seconds_per_step(ours):.2f}x",
            "",
            f"{peak_bytes(other) / peak_bytes(ours):.1f}x",
            style="bold",
        )
    return summary


def draw(runs: list[Run], path: Path) -> None:
    with figures.figure(10, 4.2) as figure:
        losses, memory = figure.subplots(1, 2)
        draw_losses(losses, runs)
        draw_memory(memory, runs)
        figures.save(figure, path)


def draw_losses(axes: "Axes", runs: list[Run]) -> None:
    """Draw the losses; the curves coincide, so the other is wide and pale, and ours thin on top."""
    ours, other = runs
    first, second = names(runs)
    apart = max(abs(a.loss - b.loss) for a, b in zip(ours.history, other.history))
    said = (second, f"{first}, within {apart:.0e}")
    for run, color, width, alpha, name in zip((other, ours), PAIR, (8, 1.8), (0.35, 1), said):
        axes.plot(
            [step.number for step in run.history],
            [step.loss for step in run.history],
            color=color,
            linewidth=width,
            alpha=alpha,
            label=name,
        )
    parallel = ours.config.parallel
    title = "Training loss" + (f", {parallel.value}" if parallel else "")
    axes.set(title=title, xlabel="step", ylabel="nats per token")
    figures.names_above(axes)


def draw_memory(axes: "Axes", runs: list[Run]) -> None:
    """Draw the memory from zero, so that heights are in proportion to bytes."""
    ours, other = runs
    low, top = sorted(map(peak_bytes, runs))
    unit, unit_name = (1e9, "GB") if top >= 1e9 else (1e6, "MB")
    for run, color, name in zip((other, ours), PAIR, reversed(names(runs))):
        measured = [
            (step.number, step.peak_bytes / unit) for step in run.history if step.peak_bytes is not None
        ]
        text = f"{name}  {readable(peak_bytes(run))}"
        axes.plot(*zip(*measured), color=color, linewidth=2, marker="o", markersize=4, label=text)
    axes.set(
        title=("A rank's peak of" if ours.config.parallel else "Peak memory of") + " head and loss",
        xlabel="step",
        ylabel=unit_name,
        ylim=(0, 1.1 * top / unit),
    )
    figures.names_above(axes)
    middle = sum(axes.get_xlim()) / 2
    apart = top >= 2 * low  # Otherwise there is more room below both lines than between them.
    if apart:
        axes.annotate(
            "",
            xy=(middle, peak_bytes(ours) / unit),
            xytext=(middle, peak_bytes(other) / unit),
            arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 6, "shrinkB": 6},
        )
    ratio = f"{peak_bytes(other) / peak_bytes(ours):.1f}x"
    shape = f"{ours.config.tokens_per_step:,} tokens\n{ours.config.vocab_size:,} classes"
    beside = (middle, ((low + top) / 2 if apart else low / 2) / unit)
    axes.annotate(ratio, beside, (10, 4), textcoords="offset points", fontsize=15, weight="bold")
    axes.annotate(shape, beside, (10, -4), textcoords="offset points", va="top")
