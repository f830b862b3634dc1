"""Show estimates as a table on the terminal and as a picture."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lowtide.tools import figures
from lowtide.tools.estimate.setting import Loss, Setting
from lowtide.tools.estimate.step import Estimate, Result
from lowtide.tools.estimate.tracker import ACTIVATIONS, CATEGORIES, GRADIENTS, LOGITS, OPTIMIZER, WEIGHTS
from lowtide.tools.units import unit_of

COLORS = {
    WEIGHTS: "#495057",
    GRADIENTS: "#868e96",
    OPTIMIZER: "#ced4da",
    ACTIVATIONS: figures.COLORS["lowtide"],
    LOGITS: figures.COLORS["eager"],
}


def print_table(console: Console, results: Sequence[Result]) -> None:
    """Print what one setting holds at its peak, by category, with a column for each loss."""
    one = results[0].estimate
    unit, name = _unit(results)
    table = Table()
    table.add_column(f"{name} at the peak")
    for result in results:
        table.add_column(result.estimate.loss.value, justify="right")
    for category in CATEGORIES:
        table.add_row(category, *(f"{each.estimate.held[category] / unit:,.2f}" for each in results))
    table.add_section()
    table.add_row("peak", *(f"{each.estimate.peak / unit:,.2f}" for each in results), style="bold")
    table.add_row("reached in", *(each.estimate.when for each in results))
    if any(each.measured or each.out_of_memory for each in results):
        table.add_row("measured", *(_measured(each, unit) for each in results))
        table.add_row("estimate is off by", *(_error(each) for each in results))
    divided = f" in all, divided over {one.setting.ranks} ranks" * (one.setting.fsdp > 1)
    title = f"{one.setting.batch} x {one.setting.length:,} tokens, {_how(one.setting)}"
    console.print(f"[bold]{title}[/bold]: {_count(one.parameters)} parameters{divided}")
    console.print(f"assumed: {one.device}")
    console.print(table)
    console.print(
        f"one copy of the logits {one.logits / unit:,.2f} {name}, "
        f"one hidden state a layer {one.hidden / unit:,.2f} {name}\n"
    )


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:,.3f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.1f} million"


def _unit(results: Sequence[Result]) -> tuple[int, str]:
    return unit_of(min(each.estimate.peak for each in results))


def _measured(result: Result, unit: int) -> str:
    return "out of memory" if result.measured is None else f"{result.measured / unit:,.2f}"


def _error(result: Result) -> str:
    return "" if result.measured is None else f"{100 * (result.estimate.peak / result.measured - 1):+.1f} %"


def _how(setting: Setting) -> str:
    how = [setting.dtype.value, setting.optimizer.value, *["checkpointing"] * setting.checkpointing]
    if setting.fsdp > 1 and setting.tp > 1:
        how.append(f"on each of {setting.fsdp} x {setting.tp} ranks, FSDP2 x tensor-parallel")
    elif setting.ranks > 1:
        kind = "tensor-parallel " if setting.tp > 1 else ""
        how.append(f"on each of {setting.ranks} {kind}ranks")
    return ", ".join([*how, *["shard_head"] * setting.shard_head])


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw a bar for each result, in the order of the tables."""
    unit, name = _unit(results)
    with figures.figure(10, 1.6 + 0.55 * len(results)) as figure:
        axes = figure.subplots()
        left = [0.0] * len(results)
        for category in CATEGORIES:
            widths = [each.estimate.held[category] / unit for each in results]
            axes.barh(range(len(results)), widths, left=left, color=COLORS[category], label=category)
            left = [at + width for at, width in zip(left, widths)]
        for place, result in enumerate(results):
            color = figures.COLORS[result.estimate.loss.value]
            text = f"{result.estimate.peak / unit:,.2f} {name}"
            if result.measured:
                axes.plot(
                    [result.measured / unit] * 2, [place - 0.46, place + 0.46], color=figures.INK, linewidth=2
                )
                text += f"  (measured {result.measured / unit:,.2f})"
            end = max(left[place], (result.measured or 0) / unit)
            beside: dict[str, Any] = {"textcoords": "offset points", "va": "center", "weight": "bold"}
            axes.annotate(text, (end, place), (8, 0), color=color, **beside)
        axes.set_yticks(range(len(results)), [_name(each.estimate) for each in results])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=name)
        how = _how(results[0].estimate.setting)
        axes.set_title(f"Peak memory of a training step: {how}", pad=34)
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1), ncols=len(CATEGORIES), frameon=False, borderpad=0
        )
        figures.save(figure, path)


def _name(estimate: Estimate) -> str:
    many = f"{estimate.setting.batch} x {estimate.setting.length:,}"
    return f"{estimate.loss.value}, {many}" if estimate.loss is Loss.eager else estimate.loss.value
