"""Turn an error that the user can correct into a sentence on the standard error.

The exit status is then 1. A defect of lowtide keeps its traceback.
"""

import errno
import os
import re
from typing import Any

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from lowtide.core.errors import ArgumentError, ArgumentTypeError
from lowtide.tools.errors import UserError
from lowtide.tools.ranks import tell_torchrun

# On a host without memory torch raises a plain RuntimeError; only its text identifies it.
NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "alloc_cpu", "bad allocation", "std::bad_alloc"),
    *("Storage size calculation overflowed", "invalid size, tried to allocate"),
)
# Arguments whose option has another name.
RENAMED = {"p": "dropout", "attn_bias": "bias"}
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota of the disk is used up",
    errno.EROFS: "the disk can only be read",
}


class Commands(TyperGroup):
    """Group commands, and print a sentence for an error that the user can correct."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            said = sentence(error)
            if said is None:
                raise
            if isinstance(error, (ArgumentError, ArgumentTypeError)):
                said = in_options(said, self.commands.get(ctx.invoked_subcommand, self).params)
            show(f"{_name(ctx)}: {said}")
            tell_torchrun(f"{_name(ctx)}: {said}")
            raise typer.Exit(1) from error


def sentence(error: Exception) -> str | None:
    """Return the sentence, or None for an error that no user can correct."""
    if isinstance(error, (UserError, ArgumentError, ArgumentTypeError)):
        return str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return "the GPU has not enough memory: choose smaller sizes, or stop what else runs on it"
    if isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(each in str(error) for each in NO_MEMORY)
    ):
        return "there is not enough memory for these sizes: choose smaller ones"
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        return describe(error)
    return None


def in_options(said: str, parameters: list[Any]) -> str:
    """Return the sentence with the names of options in place of those of a function's arguments."""
    options = {each.name: each.opts[0] for each in parameters}
    for argument in (*options, *RENAMED):
        option = options.get(RENAMED.get(argument, argument))
        if option is not None:
            said = re.sub(rf"^{argument}(?= )", option, said)
            said = re.sub(rf"\b{argument}='(\w+)'", rf"{option} \1", said)
    return re.sub(r", or None for (the default|none)", "", said)  # an option is left out instead


def describe(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    reason = REASONS.get(error.errno) or os.strerror(error.errno).lower()
    return f"{error.filename}: {reason}" if error.filename else reason


def show(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def _name(context: Any) -> str:
    """Return the command's words, as in "lowtide bench draw"."""
    words = [context.invoked_subcommand]
    while context.parent is not None:
        words.insert(0, context.info_name)
        context = context.parent
    return " ".join(("lowtide", *filter(None, words)))
