"""Implement `lowtide profile`: record the memory of a script or of training steps over time.

The command writes the record as a picture, and as a file for PyTorch's viewer.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.shared.errors import show
from lowtide.cli.shared.parameters import (
    MOST,
    MOST_TOKENS,
    DeviceOption,
    check_output,
    output_directory,
    refuse_given,
)
from lowtide.tools.environment import Device, choose_device
from lowtide.tools.errors import UserError
from lowtide.tools.estimate.model import usual_dtype
from lowtide.tools.estimate.setting import Dtype, Loss, Optimizer, Setting
from lowtide.tools.figures import check_picture
from lowtide.tools.profile.record import Record, save
from lowtide.tools.profile.run import INTERRUPTED
from lowtide.tools.profile.run import script as run_script
from lowtide.tools.profile.run import steps as run_steps
from lowtide.tools.profile.timeline import draw, timeline
from lowtide.tools.units import readable

# Arguments after the script's name belong to the script.
SETTINGS = {"allow_interspersed_args": False}
OF_STEPS = ("loss", "batch", "length", "dtype", "optimizer", "checkpointing", "steps")
SNAPSHOT, PICTURE = "memory.pickle", "memory.png"


def profile(
    context: typer.Context,
    script: Annotated[
        Path | None, typer.Argument(help="A Python script, then its own arguments.", show_default=False)
    ] = None,
    arguments: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="Record steps of this model instead of a script; names are those of lowtide estimate."
        ),
    ] = None,
    loss: Annotated[Loss, typer.Option(help="The loss of the steps.")] = Loss.lowtide,
    batch: Annotated[int, typer.Option(min=1, max=MOST, help="Sequences in a step.")] = 1,
    length: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens in a sequence.")] = 1024,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="The dtype of weights and products.", show_default="bfloat16; the demo's own"),
    ] = None,
    optimizer: Annotated[Optimizer, typer.Option(help="The optimizer of the steps.")] = Optimizer.adamw,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing", help="Checkpoint the layers in the steps.")
    ] = False,
    steps: Annotated[int, typer.Option(min=1, help="Steps to record, after one that is not recorded.")] = 3,
    device: DeviceOption = Device.auto,
    out: Annotated[
        Path,
        typer.Option(
            parser=output_directory, metavar="DIRECTORY", help="The directory that both files are written to."
        ),
    ] = Path("runs/profile"),
) -> None:
    """Record every allocation, and write memory.png and memory.pickle.

    pytorch.org/memory_viz opens memory.pickle in the browser. On CUDA the file
    holds the history of the caching allocator, on the CPU that of torch's
    allocations. Times are those of the host, which allocates memory before a GPU
    uses it; with CUDA_LAUNCH_BLOCKING=1 the host waits for the GPU. Ctrl-C ends
    the recording, and both files are written with the record so far.
    """
    if (script is None) == (step is None):
        raise UserError("give either a script or --step MODEL")
    if script is not None:
        refuse_given(context, OF_STEPS, "is for --step MODEL; options of the script follow its name")
    check_picture(out / PICTURE)
    check_output(out / PICTURE, out / SNAPSHOT)
    files = Path.cwd() / out  # Absolute, because a script may change the directory.
    chosen = choose_device(device)
    if script is not None:
        record, status = run_script(script, arguments or [], chosen)
        label, title = "held", f"Memory of {script.name}"
    else:
        model = step or ""
        setting = Setting(model, batch, length, dtype or usual_dtype(model), optimizer, checkpointing)
        record, status = run_steps(setting, loss, steps, chosen)
        label, title = loss.value, f"Memory of {steps} training steps, {batch} x {length:,} tokens"
    # On the CPU the record begins with the first event: memory allocated before is not in it.
    before = " beyond what was held before" if step and chosen == "cpu" else ""
    if status == INTERRUPTED:
        Console().print("interrupted; what follows was recorded until then")
    try:
        write(record, label, title, before, out, files)
    except UserError as nothing:
        if not status:
            raise
        show(f"lowtide profile: {nothing}")
        raise typer.Exit(status) from nothing
    raise typer.Exit(status)


def write(record: Record, label: str, title: str, before: str, out: Path, files: Path) -> None:
    """Print the peak and write both files to the directory `files`, which messages name `out`.

    Each result is printed as soon as it is computed, so that a user who interrupted a run need not
    wait for the picture.
    """
    lines = {
        place: timeline(record.snapshot, place) for place in range(len(record.snapshot["device_traces"]))
    }
    used = {f"cuda:{place}": line for place, line in lines.items() if line.bytes}
    if not used:
        raise UserError("nothing was allocated through torch")
    device, line = max(used.items(), key=lambda each: each[1].peak)
    several = len(used) > 1
    of_device = f" on {device}, the most of {len(used)} devices" if several else ""
    console = Console()
    console.print(f"peak: {readable(line.peak, ',.2f')}{before}{of_device}")
    save(record.snapshot, files / SNAPSHOT)
    console.print(f"for pytorch.org/memory_viz: {out / SNAPSHOT}", soft_wrap=True)
    draw(label, line, f"{title}, {device}" if several else title + before, files / PICTURE)
    console.print(f"picture: {out / PICTURE}", soft_wrap=True)
