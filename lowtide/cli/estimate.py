"""Implement `lowtide estimate`: predict the peak memory of a training step."""

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.shared.parameters import MOST, MOST_TOKENS, output_file, picture_option, refuse_given
from lowtide.cli.shared.parameters import workspace as workspace_option
from lowtide.cli.shared.progress import progress
from lowtide.tools.estimate.model import departures, usual_dtype
from lowtide.tools.estimate.report import draw, print_table
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.estimate.step import Result
from lowtide.tools.estimate.step import estimate as estimated
from lowtide.tools.estimate.table import read, write
from lowtide.tools.estimate.training import measure as measured_peak

OF_A_MODEL = (
    *("batch", "length", "dtype", "optimizer", "checkpointing", "workspace"),
    *("fsdp", "shard_head", "tp", "measure", "csv"),
)


def estimate(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json, the directory of one, demo-cpu or demo-cuda; or a file that --csv wrote."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences in a step, on each rank.")] = 1,
    length: Annotated[
        list[int] | None,
        typer.Option(min=2, max=MOST_TOKENS, help="Tokens in a sequence; repeatable.", show_default="8192"),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="The dtype of weights and products; autocast: float32 weights, bfloat16 products.",
            show_default="bfloat16; the demo's own",
        ),
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Fused where torch has it.")] = Optimizer.adamw,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Keep one hidden state per layer, and recompute the rest.")
    ] = False,
    workspace: Annotated[int | None, workspace_option("For lowtide's loss")] = None,
    fsdp: Annotated[
        int,
        typer.Option(
            min=1,
            max=MOST,
            metavar="RANKS",
            help="Divide the parameters over so many ranks by FSDP2, layer by layer.",
        ),
    ] = 1,
    shard_head: Annotated[
        bool, typer.Option("--shard-head", help="Apply lowtide.shard_head, if the loss is lowtide's.")
    ] = False,
    tp: Annotated[
        int,
        typer.Option(
            min=1, max=MOST, metavar="RANKS", help="Divide layers over so many ranks by the tp_plan."
        ),
    ] = 1,
    out: Annotated[Path | None, picture_option("Draw the bars to this file, .png or .svg.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the same step on the GPU too, and print both numbers.")
    ] = False,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", parser=output_file, metavar="FILE", help="Write the tables to this file."),
    ] = None,
) -> None:
    """Estimate the peak memory of a training step, with eager logits and with lowtide's.

    The step runs on fake tensors: no GPU, no data, no memory, no network. The
    numbers are what CUDA's allocator would hold for tensors at the highest
    moment of a step: weights, gradients, optimizer states, activations, logits.
    With --fsdp, --tp or both they are those of one rank, and no other rank is started.
    """
    console = Console()
    if fsdp > 1:
        refuse_given(context, ("measure",), "runs one process, and --fsdp asks for several ranks")
    else:
        refuse_given(context, ("shard_head",), "divides the head over ranks: give --fsdp, too")
    if tp > 1:
        refuse_given(context, ("measure",), "runs one process, and --tp asks for several ranks")
    if model.endswith(".csv"):
        refuse_given(context, OF_A_MODEL, f"is for a model, and {model} is shown as it was written")
        found = read(Path(model))
        pairs = (list(each) for _, each in groupby(found, lambda result: result.estimate.setting))
    else:
        used = dtype or usual_dtype(model)
        for departure in departures(model):
            console.print(departure, soft_wrap=True)
        settings = (
            Setting(model, batch, each, used, optimizer, checkpointing, workspace, fsdp, shard_head, tp)
            for each in length or [8192]
        )
        pairs = ([_result(setting, loss, measure) for loss in Loss] for setting in settings)
    results: list[Result] = []
    for pair in pairs:
        print_table(console, pair)
        results += pair
    if csv is not None:
        write(results, csv)
    if out is not None:
        draw(results, out)
        console.print(f"picture: {out}", soft_wrap=True)


def _result(setting: Setting, loss: Loss, measure: bool) -> Result:
    with progress(f"{setting.batch} x {setting.length:,} tokens, {loss.value}") as tell:
        estimate = estimated(setting, loss, report=tell)
        if not measure:
            return Result(estimate)
        tell("measuring")
        peak = measured_peak(setting, loss)
        return Result(estimate, peak, out_of_memory=peak is None)
