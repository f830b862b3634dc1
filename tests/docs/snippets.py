"""Find and run the blocks of Python on a page."""

import contextlib
import importlib.util
import io
import re
import symtable
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The records of decisions are kept as they were written.
PAGES = sorted(page for page in DOCS.rglob("*.md") if not {"decisions", "_build"} & {*page.parts})
PROMISE = re.compile(r"^ *print\(.*\)  # (.+)$", re.MULTILINE)


def blocks_of(page):
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def missing(block):
    """What its first line, `# needs A and B`, asks for and this machine lacks; None if nothing."""
    needs = re.match(r"# needs (.+)\n", block)
    for need in needs[1].split(" and ") if needs else ():
        there = torch.cuda.is_available() if need == "a CUDA device" else importlib.util.find_spec(need)
        if not there:
            return need
    return None


def run(block, names, title="block"):
    """Run a block, and compare what it prints with what its comments promise."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(block, title, "exec"), names)
    for promise in PROMISE.findall(block):
        assert promise.strip(" .") in printed.getvalue(), f"{title}: {promise!r}, not {printed.getvalue()!r}"
    return printed.getvalue()


def forget(names):
    """Delete what a page's blocks left.

    An FSDP2 unit is kept by its own graph, and later tests of divided weights would find it.
    """
    for name in [name for name in names if not name.startswith("_")]:  # Dynamo deletes its own
        del names[name]


def names_of(block):
    """The names that a block binds, and those that it reads and does not bind."""
    whole = symtable.symtable(block, "block", "exec")
    bound = {each.get_name() for each in whole.get_symbols() if each.is_assigned() or each.is_imported()}
    read = {
        each.get_name()
        for table in _tables(whole)
        for each in table.get_symbols()
        if each.is_referenced() and each.is_global()
    }
    return bound, read - bound


def _tables(table):
    yield table
    for each in table.get_children():
        yield from _tables(each)


def needs_earlier_blocks(blocks):
    """Return True if a block reads what an earlier one has bound."""
    earlier = set()
    for block in blocks:
        bound, read = names_of(block)
        if read & earlier:
            return True
        earlier |= bound
    return False
