"""Define options that several commands share: dtypes, bytes, and files to be written.

An option is checked when it is read, before any work starts.
"""

import math
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from lowtide.cli.shared.errors import describe
from lowtide.tools import figures, files
from lowtide.tools.environment import Device
from lowtide.tools.errors import UserError
from lowtide.tools.ranks import is_first

UNITS = {"": 1, "b": 1}
UNITS |= {f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}
UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
MOST_BYTES = 2**63 - 1

# Three sizes of MOST multiply to 2^60, which fits in 64 bits.
MOST = 2**20
MOST_TOKENS = 2**24

DeviceOption = Annotated[Device, typer.Option(help="Auto: the GPU if there is one.")]


class DType(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"
    float64 = "float64"

    @property
    def torch(self) -> torch.dtype:
        return getattr(torch, self.value)  # type: ignore[no-any-return]


# Options of a call, in every command that describes or makes one.
Autocast = Annotated[DType | None, typer.Option(help="Autocast to this dtype.", show_default="none")]
Bias = Annotated[bool, typer.Option("--bias", help="With a bias of the classes.")]
Reduction = Annotated[str, typer.Option(help="mean, sum or none.")]
Softcap = Annotated[float | None, typer.Option(help="Soft cap of the scores or logits.", show_default="none")]
Argument = typer.Option(help="The argument of the call.")


def size_in_bytes(words: str) -> int:
    """Parse a size: 256MiB is 256 * 2**20, 256MB is 256 * 10**6, a number alone is bytes."""
    found = re.fullmatch(r"([0-9.]+(?:e\+?[0-9]+)?) ?([a-z]*)", str(words), re.IGNORECASE)
    if found is None or (unit := UNITS.get(found[2].lower())) is None:
        raise typer.BadParameter(f"{words!r} must be a number of bytes, as 256MiB, 1.5GB or 268435456")
    try:
        size = int(found[1]) * unit if found[1].isdigit() else float(found[1]) * unit
    except ValueError:
        size = math.inf
    if not 1 <= size <= MOST_BYTES:
        raise typer.BadParameter(
            f"{words!r} must be from 1 to 2**63 - 1 bytes; a number without a unit, as in 256MiB, is bytes"
        )
    return int(size)


def workspace(help: str, show_default: str = "lowtide's own default") -> Any:
    """Return the option --workspace, the same in every command."""
    return typer.Option(
        "--workspace",
        parser=size_in_bytes,
        metavar="BYTES",
        help=f"{help}: 256MiB, 1GB, or a number of bytes.",
        show_default=show_default,
    )


def output_file(words: str) -> Path:
    if not str(words):
        raise typer.BadParameter("must name a file, got ''")
    check_output(Path(words))
    return Path(words)


def output_picture(words: str) -> Path:
    try:
        figures.check_picture(Path(words))
    except UserError as reason:
        raise typer.BadParameter(str(reason)) from reason
    return output_file(words)


def picture_option(help: str) -> Any:
    return typer.Option(parser=output_picture, metavar="FILE", help=help)


def output_directory(words: str) -> Path:
    if not str(words):
        raise typer.BadParameter("must name a directory, got ''")
    check_output(Path(words) / ".lowtide")
    return Path(words)


def check_output(*paths: Path) -> None:
    if not is_first():  # Other ranks write nothing, and trying at once with the first could fail.
        return
    for path in paths:
        try:
            files.check_writable(path)
        except OSError as problem:
            raise typer.BadParameter(f"cannot write there: {describe(problem)}") from problem


def refuse_given(context: typer.Context, names: Iterable[str], reason: str) -> None:
    """Refuse those of these options that were given: they would be ignored silently."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            raise typer.BadParameter(reason, param_hint=f"--{name.replace('_', '-')}")
