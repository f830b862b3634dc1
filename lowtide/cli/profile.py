"""`lowtide profile`: the memory of a script or of a training step over time, as a picture and for PyTorch's
viewer."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.estimate.model import usual_dtype
from lowtide.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.profile.record import Record, save
from lowtide.profile.run import script as run_script
from lowtide.profile.run import steps as run_steps
from lowtide.profile.timeline import draw, timeline, unit_of
from lowtide.train.config import Device, UserError, choose_device

# What follows the script's name is the script's.
SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}


def profile(
    script: Annotated[
        Path | None, typer.Argument(help="A Python script, then its own arguments.", show_default=False)
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    step: Annotated[
        str | None,
        typer.Option(help="Instead of a script, steps of this model, as lowtide estimate takes them."),
    ] = None,
    loss: Annotated[Loss, typer.Option(help="Of the steps.")] = Loss.lowtide,
    batch: Annotated[int, typer.Option(min=1, help="Sequences of a step.")] = 1,
    length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 1024,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="Of weights and products.", show_default="bfloat16; of the demo what that has"),
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="Of the steps.")] = Optimizer.adamw,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="In the steps.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="How many, after one that is not recorded.")] = 3,
    device: Annotated[Device, typer.Option(help="Auto: the GPU if there is one.")] = Device.auto,
    out: Annotated[Path, typer.Option(help="A directory for both files.", file_okay=False)] = Path(
        "runs/profile"
    ),
) -> None:
    """Record every allocation, and write memory.png and memory.pickle.

    pytorch.org/memory_viz opens memory.pickle in the browser. On CUDA it is the
    history of the caching allocator, on the CPU that of torch's allocations.
    Time is the host's, which hands out memory ahead of a GPU; with
    CUDA_LAUNCH_BLOCKING=1 it waits for it.
    """
    console = Console()
    status = 0
    try:
        if find_spec("matplotlib") is None:
            raise UserError("the picture needs matplotlib; install it with: pip install 'lowtide[plot]'")
        chosen = choose_device(device)
        if (script is None) == (step is None):
            raise UserError("give either a script or --step MODEL")
        if script is not None:
            record, status = run_script(script, arguments or [], chosen)
            title = f"Memory of {script.name}"
        else:
            model = step or ""
            setting = Setting(model, batch, length, dtype or usual_dtype(model), optimizer, checkpointing)
            record = run_steps(setting, loss, steps, chosen)
            title = f"Memory of {steps} training steps, {batch} x {length:,} tokens"
        label = loss.value if script is None else "held"
        # The CPU's events say nothing of what was there before.
        before = " beyond what was held before" if step and chosen == "cpu" else ""
        write(record, label, title, before, out, console)
    except (UserError, OSError) as error:
        Console(stderr=True).print(f"lowtide profile: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    raise typer.Exit(status)


def write(record: Record, label: str, title: str, before: str, out: Path, console: Console) -> None:
    lines = {
        place: timeline(record.snapshot, place) for place in range(len(record.snapshot["device_traces"]))
    }
    used = {f"cuda:{place}": line for place, line in lines.items() if line.bytes}
    if not used:
        raise UserError("nothing was allocated through torch")
    device, line = max(used.items(), key=lambda each: each[1].peak)
    several = len(used) > 1
    save(record.snapshot, out / "memory.pickle")
    draw({label: line}, f"{title}, {device}" if several else title + before, out / "memory.png")
    unit, name = unit_of(line.peak)
    of_device = f" on {device}, the most of {len(used)} devices" if several else ""
    console.print(f"peak: {line.peak / unit:,.2f} {name}{before}{of_device}")
    console.print(f"picture: {out / 'memory.png'}", soft_wrap=True)
    console.print(f"for pytorch.org/memory_viz: {out / 'memory.pickle'}", soft_wrap=True)
