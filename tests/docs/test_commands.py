"""Every command that a page shows is one that the parser takes."""

import re
import shlex

import pytest

from tests.docs.snippets import DOCS, PAGES, ROOT

typer = pytest.importorskip("typer")

from lowtide.cli import make_app  # noqa: E402

BEFORE = r"(?:    |\$ )?(?:OMP_NUM_THREADS=1 |\.venv/bin/|torchrun --nproc-per-node=\d+ -m )?"
COMMAND = re.compile(rf"^{BEFORE}(lowtide [^\n|`]*?)(?:  +#.*)?$", re.MULTILINE)


def commands_of(page):
    fences = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    indented = re.findall(r"^    lowtide .*$|^    \.venv/bin/lowtide .*$", page.read_text(), re.MULTILINE)
    directives = re.findall(r"^:command: (lowtide .*)$", page.read_text(), re.MULTILINE)
    texts = (text.replace("\\\n", "") for text in (*fences, *indented, *directives))
    return [match[1] for text in texts for match in COMMAND.finditer(text)]


FOUND = {page.relative_to(ROOT).as_posix(): commands_of(page) for page in [ROOT / "README.md", *PAGES]}


@pytest.mark.parametrize("page", [page for page, commands in FOUND.items() if commands])
def test_commands_parse(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in FOUND[page]:
        _, *words = shlex.split(line, comments=True)
        command = typer.main.get_command(make_app())
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        command.make_context(line, words)


@pytest.mark.parametrize("page", FOUND)
def test_commands_are_blocks(page):
    """Not the beginning of a paragraph."""
    prose = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    commands = r"^(?:lowtide (?:bench|doctor|estimate|profile|train) .*--.*|make [a-z-]+ *(?:#.*)?)$"
    assert not re.findall(commands, prose, re.MULTILINE)


def test_commands_are_found():
    assert sum(map(len, FOUND.values())) > 30
    assert commands_of(DOCS / "reference" / "ways.md")[0].startswith("lowtide doctor")


def test_command_that_is_none_is_told():
    command = typer.main.get_command(make_app()).commands["train"]
    with pytest.raises(Exception, match="no-such-option"):
        command.make_context("train", ["--no-such-option"])
