"""Turn the sections of a docstring into what Sphinx renders.

A section is a name with a colon, `Shapes:` or `Memory:`, and the text behind or below it. Entries
`name: text` of `Args:` and the like become a list of definitions. Single backquotes are code
(`default_role`), mathematics is Sphinx's own. The title of a page, `the page "The loss"`, becomes a
link.
"""

import re
from functools import cache
from itertools import takewhile
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

from sphinx.application import Sphinx

NAMES = (
    "Args|Attributes|Default|Derivatives|Determinism|Dtypes|Limits|Memory|Precision|Raises|Returns|"
    "Shapes|Sharded heads|Source|Transforms|Unchanged|Warns|What counts|What does not count|Yields"
)
SECTION = re.compile(rf"^((?:{NAMES})\b[\w, ]*):( .*)?$")
FIELDS = {"Args", "Attributes", "Raises", "Warns"}
DOCS = Path(__file__).parents[1]
PAGE = re.compile(r'\b([Tt]he page\s+)"([^"]+)"')
ENTRY = re.compile(r"^([A-Za-z_][\w, *]*): (.*)$")


def sections(lines: list[str]) -> list[str]:
    """Return the docstring's lines with its sections as titles and lists of fields."""
    out: list[str] = []
    place = 0
    while place < len(lines):
        line = lines[place]
        place += 1
        match = SECTION.match(line)
        if match is None or line.endswith("::"):
            out.append(line)
            continue
        name, rest = match[1], (match[2] or "").strip()
        inner = [*takewhile(lambda each: not each or each.startswith("    "), lines[place:])]
        if not rest and not inner:
            out.append(line)
            continue
        place += len(inner)
        body = dedent("\n".join(inner)).splitlines()
        if rest:  # `Shapes: [B]; the result is 0-d` goes on at the margin
            more = [*takewhile(lambda each: each and not SECTION.match(each), lines[place:])]
            place += len(more)
            body = [rest, *more, *body]
        out += ["", f"**{name}**", ""]
        out += _fields(body) if name in FIELDS else indent("\n".join(body), "    ").splitlines()
        out.append("")
    return out


def _fields(body: list[str]) -> list[str]:
    """Return entries `name: text` as a list of definitions, and what is none as a paragraph."""
    out: list[str] = []
    within = listed = False
    for line in body:
        entry = ENTRY.match(line)
        if entry:
            names = ", ".join(f"``{name}``" for name in entry[1].split(", "))
            out += ["", names, f"    {entry[2]}"]
            within, listed = True, False
        elif line.startswith("    ") and within:
            if line.startswith("    * ") and not listed:
                out.append("")
                listed = True
            out.append(line)
        else:
            out += ["", line] if within else [line]
            within = within and not line
    return out


@cache
def pages() -> list[tuple[str, str]]:
    """Return each page as `/howto/NAME`, with its title."""
    paths = [*DOCS.glob("*.md"), *DOCS.glob("[a-z]*/*.md")]
    titles = (re.search(r"^# (.+)$", path.read_text(), re.MULTILINE) for path in paths)
    names = (f"/{path.relative_to(DOCS).with_suffix('').as_posix()}" for path in paths)
    return [(name, title[1]) for name, title in zip(names, titles) if title]


def linked(text: str) -> str:
    """Return the text with each title of a page as a link."""

    def link(match: re.Match[str]) -> str:
        title = " ".join(match[2].split())
        found = [name for name, each in pages() if each == title]
        if len(found) != 1:
            raise ValueError(f"a docstring names the page {title!r}; of this title are {found}")
        return f"{match[1]}:doc:`{found[0]}`"

    return PAGE.sub(link, text)


def _process(_app: Sphinx, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = linked("\n".join(sections(lines))).split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
