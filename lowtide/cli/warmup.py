"""Implement `lowtide warmup`: compile what the first loss of some shapes will need."""

import contextlib
import time
from typing import Annotated

import torch
import typer
from rich.console import Console

from lowtide import warmup as run
from lowtide.cli.shared.parameters import Argument, Autocast, Bias, DeviceOption, DType, Reduction, Softcap
from lowtide.cli.shared.parameters import workspace as workspace_option
from lowtide.tools.environment import Device, choose_device


def warmup(
    shape: Annotated[
        list[str],
        typer.Option(metavar="N,D,V", help="Tokens, features and classes of a call; repeatable."),
    ],
    dtype: Annotated[DType, typer.Option(help="The dtype of input and weight.")] = DType.bfloat16,
    device: DeviceOption = Device.auto,
    autocast: Autocast = None,
    bias: Bias = False,
    softcap: Softcap = None,
    label_smoothing: Annotated[float, Argument] = 0.0,
    z_loss: Annotated[float, Argument] = 0.0,
    reduction: Reduction = "mean",
    workspace: Annotated[int | None, workspace_option("What the call may hold")] = None,
) -> None:
    """Compile what linear_cross_entropy needs for these shapes, and keep it in the caches on disk.

    It runs each call once, forward and backward, on tensors of zeros; later
    processes find the kernels compiled.
    """
    on = choose_device(device)
    sizes = [_sizes(words) for words in shape]
    options = {
        "linear_bias": bias or None,
        "softcap": softcap,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "reduction": reduction,
        "workspace": workspace,
    }
    console = Console(highlight=False)
    casts = contextlib.nullcontext() if autocast is None else torch.autocast(on, autocast.torch)
    for N, D, V in sizes:
        started = time.perf_counter()
        with casts:
            run([(N, D, V)], dtype=dtype.torch, device=on, **options)
        seconds = time.perf_counter() - started
        console.print(f"{N} x {D} x {V} {dtype.value} on {on}: {seconds:.1f} s")


def _sizes(words: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in words.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) != 3:
        raise typer.BadParameter(f"{words!r} must be N,D,V: tokens, features, classes", param_hint="--shape")
    return sizes
