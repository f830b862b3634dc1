"""Compare runs by a table, and by a figure of the loss and of the loss step's memory."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from lowtide.tools import figures
from lowtide.tools.demo.loop import Run
from lowtide.tools.figures import COLORS, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def seconds_per_step(run: Run) -> float:
    """Return the median of the steps without a measured memory, because measuring takes time."""
    clean = [step.seconds for step in run.history if step.peak_bytes is None]
    return statistics.median(clean or [step.seconds for step in run.history])


def peak_bytes(run: Run) -> int:
    return max(step.peak_bytes or 0 for step in run.history)


def readable(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def table(runs: list[Run]) -> Table:
    """Return a row for each run; for two also the losses' difference and the ratio of the rest."""
    caption = "peak: the most that head and loss hold at once, with their gradients"
    if len(runs) == 2:
        caption += "\nlast row: how far the losses are apart; eager's time and peak over lowtide's"
    summary = Table(caption=caption)
    for column in ("loss", "final loss", "validation", "step", "tokens/s", "peak"):
        summary.add_column(column, justify="left" if column == "loss" else "right")
    for run in runs:
        seconds = seconds_per_step(run)
        summary.add_row(
            run.config.loss,
            f"{run.history[-1].loss:.6f}",
            f"{run.validation_loss:.6f}",
            f"{seconds * 1000:,.0f} ms",
            f"{run.config.tokens_per_step / seconds:,.0f}",
            readable(peak_bytes(run)),
        )
    if len(runs) == 2:
        ours, eager = runs
        summary.add_section()
        summary.add_row(
            "eager vs lowtide",
            f"{abs(eager.history[-1].loss - ours.history[-1].loss):.1e}",
            f"{abs(eager.validation_loss - ours.validation_loss):.1e}",
            f"{seconds_per_step(eager) / seconds_per_step(ours):.2f}x",
            "",
            f"{peak_bytes(eager) / peak_bytes(ours):.1f}x",
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
    """Draw the losses; the curves coincide, so eager is wide and pale, and lowtide thin on top."""
    ours, eager = runs
    apart = max(abs(a.loss - b.loss) for a, b in zip(ours.history, eager.history))
    names = (eager.config.loss, f"{ours.config.loss}, within {apart:.0e}")
    for run, width, alpha, name in zip((eager, ours), (8, 1.8), (0.35, 1), names):
        axes.plot(
            [step.number for step in run.history],
            [step.loss for step in run.history],
            color=COLORS[run.config.loss],
            linewidth=width,
            alpha=alpha,
            label=name,
        )
    axes.set(title="Training loss", xlabel="step", ylabel="nats per token")
    figures.names_above(axes)


def draw_memory(axes: "Axes", runs: list[Run]) -> None:
    """Draw the memory from zero, so that heights are in proportion to bytes."""
    ours, eager = runs
    low, top = sorted(map(peak_bytes, runs))
    unit, name = (1e9, "GB") if top >= 1e9 else (1e6, "MB")
    for run in (eager, ours):
        measured = [
            (step.number, step.peak_bytes / unit) for step in run.history if step.peak_bytes is not None
        ]
        text = f"{run.config.loss}  {readable(peak_bytes(run))}"
        axes.plot(
            *zip(*measured), color=COLORS[run.config.loss], linewidth=2, marker="o", markersize=4, label=text
        )
    axes.set(title="Peak memory of head and loss", xlabel="step", ylabel=name, ylim=(0, 1.1 * top / unit))
    figures.names_above(axes)
    middle = sum(axes.get_xlim()) / 2
    apart = top >= 2 * low  # Otherwise there is more room below both lines than between them.
    if apart:
        axes.annotate(
            "",
            xy=(middle, peak_bytes(ours) / unit),
            xytext=(middle, peak_bytes(eager) / unit),
            arrowprops={"arrowstyle": "->", "color": INK, "shrinkA": 6, "shrinkB": 6},
        )
    ratio = f"{peak_bytes(eager) / peak_bytes(ours):.1f}x"
    shape = f"{ours.config.tokens_per_step:,} tokens\n{ours.config.vocab_size:,} classes"
    beside = (middle, ((low + top) / 2 if apart else low / 2) / unit)
    axes.annotate(ratio, beside, (10, 4), textcoords="offset points", fontsize=15, weight="bold")
    axes.annotate(shape, beside, (10, -4), textcoords="offset points", va="top")
