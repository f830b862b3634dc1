"""`lowtide estimate`: what a training step holds at its highest moment, before a card is rented."""

from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.estimate.measure import measure as measured_peak
from lowtide.estimate.model import usual_dtype
from lowtide.estimate.report import GIB, Result, draw, print_table
from lowtide.estimate.rows import read, write
from lowtide.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.estimate.step import estimate as estimated
from lowtide.train.config import UserError


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="A config.json, the directory of one, demo-cpu or demo-cuda; or a file that --csv wrote."
        ),
    ],
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 1,
    length: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Tokens of a sequence; repeatable.", show_default="8192"),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(
            help="Of weights and products; autocast: float32 and bfloat16.",
            show_default="bfloat16; of the demo what that has",
        ),
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Fused where torch has it.")] = Optimizer.adamw,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Keep one hidden state a layer, and compute it again.")
    ] = False,
    workspace: Annotated[
        float | None,
        typer.Option(min=0, help="GiB for lowtide's loss.", show_default="lowtide's own default"),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Draw the bars to this file, .png or .svg.", dir_okay=False)
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the same step on the GPU too, and print both numbers.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option("--csv", help="Write the tables to this file.", dir_okay=False)
    ] = None,
) -> None:
    """Estimate the peak memory of a training step, with eager logits and with lowtide's.

    The step runs on fake tensors: no GPU, no data, no memory. The numbers are
    what CUDA's allocator would hold for tensors at the highest moment of a
    step: weights, gradients, optimizer states, activations, logits.
    """
    console = Console()
    try:
        if out is not None and find_spec("matplotlib") is None:
            raise UserError("--out draws with matplotlib; install it with: pip install 'lowtide[plot]'")
        if model.endswith(".csv"):
            if measure or csv is not None:
                raise UserError(f"{model} is shown as it was written: leave out --measure and --csv")
            found = read(Path(model))
            pairs = (list(each) for _, each in groupby(found, lambda result: result.estimate.setting))
        else:
            used = dtype or usual_dtype(model)
            allowed = None if workspace is None else int(workspace * GIB)
            pairs = (
                _made(Setting(model, batch, each, used, optimizer, checkpointing, allowed), measure, console)
                for each in length or [8192]
            )
        results: list[Result] = []
        for pair in pairs:
            print_table(console, pair)
            results += pair
        if csv is not None:
            write(results, csv)
        if out is not None:
            draw(results, out)
            console.print(f"picture: {out}")
    except (UserError, OSError) as error:
        Console(stderr=True).print(f"lowtide estimate: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _made(setting: Setting, measure: bool, console: Console) -> list[Result]:
    with console.status(f"{setting.batch} x {setting.length} tokens"):
        return [_result(setting, loss, measure) for loss in Loss]


def _result(setting: Setting, loss: Loss, measure: bool) -> Result:
    estimate = estimated(setting, loss)
    if not measure:
        return Result(estimate)
    peak = measured_peak(setting, loss)
    return Result(estimate, peak, out_of_memory=peak is None)
