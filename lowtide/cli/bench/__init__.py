"""Implement `lowtide bench`: time, memory and error of lowtide, torch and the installed peers.

Modules, in the order of imports:

* ranks: the options for several ranks, and their checks.
* tables: measure rows, print them, write the CSV; the options that all have.
* loss: `linear-cross-entropy`, `options`, `chunked-loss` and `distillation`.
* heads: `heads`, of public models.
* attention: `attention`, also of public models.
* host: `host`, what a call takes of the host.
* steps: `steps`, of fine-tuning.
* timeline: `memory-timeline`.
* saved: `draw` and `compare`, of CSVs measured before.
"""

import typer

from lowtide.cli.bench import attention, heads, host, loss, saved, steps, timeline
from lowtide.cli.shared.errors import Commands

app = typer.Typer(cls=Commands, no_args_is_help=True)


@app.callback()
def bench() -> None:
    """Measure lowtide beside torch and the peers that are installed."""


app.command("memory-timeline")(timeline.memory_timeline)
app.command("linear-cross-entropy")(loss.linear_cross_entropy)
app.command("heads")(heads.heads)
app.command("options")(loss.options_)
app.command("chunked-loss")(loss.chunked_loss)
app.command("distillation")(loss.distillation)
app.command("attention")(attention.attention)
app.command("host")(host.host)
app.command("steps")(steps.steps)
app.command("draw")(saved.draw)
app.command("compare")(saved.compare)
