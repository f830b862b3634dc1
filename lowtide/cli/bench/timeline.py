"""Implement `lowtide bench memory-timeline`.

It records the memory of a decoder's last stage over time, eager and lowtide.
"""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lowtide.cli.shared.parameters import DeviceOption, check_output, picture_option, refuse_given
from lowtide.tools.environment import Device, choose_device
from lowtide.tools.errors import UserError
from lowtide.tools.profile.last_stage import SHAPES, SMOKE, draw, measure, read, write
from lowtide.tools.units import readable


def memory_timeline(
    context: typer.Context,
    csv: Annotated[Path, typer.Option("--csv", metavar="FILE", help="Measure, and write this file.")] = Path(
        "memory_timeline.csv"
    ),
    picture: Annotated[Path | None, picture_option("Draw the CSV to this file, .png or .svg.")] = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Measure nothing: the CSV is there.")
    ] = False,
    device: DeviceOption = Device.auto,
    smoke: Annotated[bool, typer.Option("--smoke", help="Tiny shapes.")] = False,
) -> None:
    """Record three steps of norm, head and loss of Llama 3 8B's shape in the allocator.

    [B, T] = [1, 32768] and [4, 20480], in bfloat16, eager with float32 logits
    for the loss, as Transformers has it, and lowtide. Needs about 130 GB.
    """
    console = Console()
    if draw_only:
        refuse_given(context, ("device", "smoke"), "is for measuring, and --draw-only measures nothing")
    else:
        # CUDA reads it when it starts. Otherwise the host would allocate seconds ahead of the GPU.
        os.environ.setdefault("CUDA_LAUNCH_BLOCKING", "1")
        chosen = choose_device(device)
        if chosen == "cpu" and not smoke:
            raise UserError("these shapes are for a GPU of 140 GB, and torch sees none here; add --smoke")
        check_output(csv)
        write(measure(SMOKE if smoke else SHAPES, chosen), csv, chosen)
    lines = read(csv)
    for line in lines:
        peak = readable(line.timeline.peak, ",.2f")
        shape = f"[{line.shape.batch}, {line.shape.length}]"
        console.print(f"{shape} {line.provider}: {peak} {line.end}", markup=False, highlight=False)
    if picture is not None:
        draw(lines, picture)
        console.print(f"picture: {picture}", soft_wrap=True)
