"""The command line in this process, where nothing is asked of the process itself."""

import functools

from typer.testing import CliRunner

from lowtide.cli import make_app

app = functools.cache(make_app)


def invoke(*arguments):
    return CliRunner().invoke(app(), list(map(str, arguments)))


def said(done):
    """All that was printed, in one line: boxes and broken lines aside."""
    return " ".join(done.output.replace("│", " ").split())
