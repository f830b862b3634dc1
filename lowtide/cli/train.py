"""Implement `lowtide train`: a small GPT on Python's standard library, or on the user's text."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.shared.parameters import MOST, MOST_TOKENS, check_output, output_directory
from lowtide.tools.demo.compare import check_checkpoints, configs_of, train_both
from lowtide.tools.demo.config import Config, LossChoice, Parallel, choose_sizes
from lowtide.tools.demo.loop import train as train_one
from lowtide.tools.demo.report import draw, table
from lowtide.tools.demo.trainer import CHECKPOINT, LOG
from lowtide.tools.environment import Device, choose_device
from lowtide.tools.errors import UserError
from lowtide.tools.figures import check_picture
from lowtide.tools.ranks import check_alone, check_launched, from_first, is_first, joined, world_size

FIGURE = "comparison.png"


def train(
    loss: Annotated[
        LossChoice, typer.Option(help="Both: the same run twice, then a table and a figure.")
    ] = LossChoice.lowtide,
    parallel: Annotated[
        Parallel | None,
        typer.Option(
            help="Under torchrun: ranks share the tokens, the features and classes, or the head's classes "
            "beside tokens. Then one process, a table and a figure.",
            show_default="one process",
        ),
    ] = None,
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
        typer.Option(min=2, max=MOST_TOKENS, help="Tokens in a sequence.", show_default="256, GPU 1024"),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Sequences in a step.", show_default="12, GPU 16")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Steps in all, including those before a resumption.", show_default="50, GPU 500"
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Steps between checkpoints; a killed run loses at most so many.",
            show_default="25, GPU 100",
        ),
    ] = None,
    tied: Annotated[bool, typer.Option("--tied", help="Use one matrix for embedding and head.")] = False,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
) -> None:
    """Train a small GPT, end with a sample of its text, and measure what the loss step costs.

    On several ranks:
    torchrun --nproc-per-node=2 -m lowtide train --parallel data
    """
    chosen = choose_device(device)
    sizes = choose_sizes(
        chosen, width=width, depth=depth, context=context, batch=batch, steps=steps, save_every=save_every
    )

    def prepare() -> Config:
        check_parallel(parallel, loss)
        made = Config(
            loss.value,
            chosen,
            out,
            data,
            vocab_size,
            tied=tied,
            seed=seed,
            parallel=parallel,
            ranks=world_size(),
            **sizes,
        )
        if len(configs_of(made)) > 1:
            check_picture(out / FIGURE)
            check_output(out / FIGURE)
        check_output(*(each.directory / name for each in configs_of(made) for name in (CHECKPOINT, LOG)))
        if parallel:
            check_checkpoints(configs_of(made))
        return made

    with joined(chosen):
        config = from_first(prepare)
        runs = train_both(config) if loss is LossChoice.both else [train_one(config)]
    if not is_first():
        return
    if parallel:  # when the other ranks have ended, which so wait for nothing
        *_, alone = configs_of(config)
        runs.append(train_one(alone))
    console = Console()
    console.print(table(runs))
    if len(runs) > 1:
        draw(runs, out / FIGURE)
        console.print(f"figure: {out / FIGURE}", soft_wrap=True)


def check_parallel(parallel: Parallel | None, loss: LossChoice) -> None:
    if parallel is None:
        check_alone(f"--parallel, one of {', '.join(each.value for each in Parallel)}")
        return
    check_launched("--parallel", f"train --parallel {parallel.value}")
    if loss is not LossChoice.lowtide:
        raise UserError(f"--parallel goes together with --loss lowtide, the loss that divides: {loss.value}")
