"""Turn the sections of a docstring into what Sphinx renders.

A section is a name with a colon, `Shapes:` or `Memory:`, and the text behind or below it. Entries
`name: text` of `Args:` and the like become a list of definitions. Single backquotes are code
(`default_role`), mathematics is Sphinx's own. The path of a page, `docs/howto/NAME.md`, becomes a
link.
"""

import re
from itertools import takewhile
from textwrap import dedent, indent
from typing import Any

from sphinx.application import Sphinx

NAMES = (
    "Args|Attributes|Default|Derivatives|Determinism|Dtypes|Limits|Memory|Precision|Raises|Returns|"
    "Shapes|Sharded heads|Source|Transforms|Unchanged|Warns|What counts|What does not count|Yields"
)
SECTION = re.compile(rf"^((?:{NAMES})\b[\w, ]*):( .*)?$")
FIELDS = {"Args", "Attributes", "Raises", "Warns"}
PAGE = re.compile(r"\bdocs/([\w/]+)\.md\b")
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


def linked(line: str) -> str:
    """Return the line with each path of a page as a link, which shows the page's title."""
    return PAGE.sub(r":doc:`/\1`", line)


def _process(_app: Sphinx, _kind: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    lines[:] = map(linked, sections(lines))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
