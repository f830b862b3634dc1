"""Implement `lowtide train`: a small GPT on Python's standard library, or on the user's text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.parameters import MOST, MOST_TOKENS, check_output, output_directory
from lowtide.tools.demo.compare import train_both
from lowtide.tools.demo.config import Config, Loss, choose_sizes
from lowtide.tools.demo.loop import train as train_one
from lowtide.tools.demo.report import draw, table
from lowtide.tools.demo.trainer import CHECKPOINT, LOG, LOSSES
from lowtide.tools.environment import Device, choose_device
from lowtide.tools.figures import check_picture

FIGURE = "comparison.png"


def train(
    loss: Annotated[
        Loss, typer.Option(help="Both: the same run twice, then a table and a figure.")
    ] = Loss.lowtide,
    data: Annotated[
        Path | None,
        typer.Option(help="A text file or a directory of them.", show_default="Python's standard library"),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            parser=output_directory,
            metavar="DIRECTORY",
            help="Checkpoints, logs and the figure; a run found here continues.",
        ),
    ] = Path("runs/train"),
    device: Annotated[Device, typer.Option(help="Auto: the GPU if there is one, in bfloat16.")] = Device.auto,
    vocab_size: Annotated[
        int, typer.Option(min=257, max=MOST, help="Entries of the byte-level BPE.")
    ] = 32_768,
    width: Annotated[int | None, typer.Option(min=64, max=MOST, show_default="128, GPU 512")] = None,
    depth: Annotated[int | None, typer.Option(min=1, max=MOST, show_default="2, GPU 8")] = None,
    context: Annotated[
        int | None,
        typer.Option(min=2, max=MOST_TOKENS, help="Tokens of a sequence.", show_default="256, GPU 1024"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Sequences of a step.", show_default="12, GPU 16")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps in all, those before a resumption included.", show_default="50, GPU 500"
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps between checkpoints: what a killed run can lose.", show_default="25, GPU 100"
        ),
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", help="One matrix for embedding and head.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
) -> None:
    """Train a small GPT, end with a sample of its text, and measure what the loss step costs."""
    console = Console()
    chosen = choose_device(device)
    sizes = choose_sizes(
        chosen, width=width, depth=depth, context=context, batch=batch, steps=steps, save_every=save_every
    )
    config = Config(loss.value, chosen, out, data, vocab_size=vocab_size, tied=tied, seed=seed, **sizes)
    both = loss is Loss.both
    if both:
        check_picture(out / FIGURE)
        check_output(out / FIGURE)
    check_output(*(out / each / name for each in (LOSSES if both else [loss]) for name in (CHECKPOINT, LOG)))
    runs = train_both(config) if both else [train_one(config)]
    console.print(table(runs))
    if both:
        draw(runs, out / FIGURE)
        console.print(f"figure: {out / FIGURE}", soft_wrap=True)
