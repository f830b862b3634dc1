"""Runs the command line in this process, for tests that do not depend on the process itself."""

import csv
import functools

from typer.testing import CliRunner

from lowtide.cli import make_app

app = functools.cache(make_app)


def invoke(*arguments):
    return CliRunner().invoke(app(), list(map(str, arguments)))


def said(done):
    """Return all that was printed as one line, without boxes and line breaks."""
    return " ".join(done.output.replace("│", " ").split())


def rows_of(path):
    """Return the rows of a CSV that a command wrote."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))
