"""Describe the command line from its parser: `command-line` shows the `--help` of every command."""

from typing import Any

import typer
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from typer.testing import CliRunner

from lowtide.cli import make_app

COLUMNS = "80"


def commands() -> list[tuple[str, ...]]:
    """Return the words of every command, a group before what is in it."""

    def below(command: Any, words: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = getattr(command, "commands", {}).items()
        return [words, *(line for word, each in inner for line in below(each, (*words, word)))]

    return below(typer.main.get_command(make_app()), ())


def help_of(words: tuple[str, ...]) -> str:
    """Return what `lowtide WORDS --help` prints."""
    environment = {"COLUMNS": COLUMNS, "TERM": "dumb", "NO_COLOR": "1"}
    result = CliRunner(env=environment).invoke(make_app(), [*words, "--help"], prog_name="lowtide")
    if result.exit_code != 0:
        raise RuntimeError(f"lowtide {' '.join(words)} --help: {result.output}")
    return "\n".join(line.rstrip() for line in result.output.splitlines()).strip("\n")


class CommandLine(SphinxDirective):
    """Make a section for each command."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for words in commands():
            name = " ".join(("lowtide", *words))
            section = nodes.section(ids=[name.replace(" ", "-")], names=[name])
            section += nodes.title("", "", nodes.literal("", name))
            section += nodes.literal_block("", help_of(words), language="text")
            found.append(section)
        return found


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
