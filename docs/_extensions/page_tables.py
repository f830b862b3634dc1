"""Keep the tables that the site makes in the pages too, for readers of the files:

    <!-- {benchmark} h200/linear_cross_entropy_step.csv
    :where: case=A
    :columns: provider, ms
    -->

    | | ms |
    |---|--:|

    <!-- end -->

The site runs the directive in the comment and leaves out what stands between the comments. `make
tables` writes that; with --check nothing is written, and pages that it would change are named.
"""

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import benchmark_summaries
import benchmark_tables
import data_tables
import ways_of_a_call
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
BLOCK = re.compile(r"^<!-- (\{[\w-]+\}.*?)-->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


class Directive(NamedTuple):
    name: str
    argument: str
    options: Mapping[str, str]


def parsed(text: str) -> Directive:
    """Return the directive that stands in a comment."""
    head, *lines = text.strip().splitlines()
    name, argument = re.fullmatch(r"\{([\w-]+)\} ?(.*)", head).groups()
    return Directive(name, argument, dict(re.findall(r"^:([\w-]+): ?(.*)$", "\n".join(lines), re.MULTILINE)))


MAKERS: dict[str, Callable[[Directive], str]] = {
    "benchmark": lambda directive: benchmark_tables.markdown(directive.argument, directive.options),
    **{
        name: lambda _, make=make: make()
        for module in (benchmark_summaries, data_tables, ways_of_a_call)
        for name, make in module.MAKERS.items()
    },
}


def with_tables(page: str) -> str:
    """Return a page's text with what its directives make now."""

    def block(found: re.Match[str]) -> str:
        directive = parsed(found[1])
        return f"<!-- {found[1]}-->\n\n{MAKERS[directive.name](directive)}\n\n<!-- end -->"

    return BLOCK.sub(block, page)


def _as_directives(_app: Sphinx, _page: str, content: list[str]) -> None:
    content[0] = BLOCK.sub(lambda found: f"```{found[1].strip()}\n```", content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _as_directives)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def main() -> None:
    stale = []
    for page in sorted(DOCS.rglob("*.md")):
        old = page.read_text()
        new = with_tables(old)
        if new != old:
            stale.append(page.relative_to(DOCS).as_posix())
            if "--check" not in sys.argv:
                page.write_text(new)
    if stale and "--check" in sys.argv:
        sys.exit(f"make tables would change {', '.join(stale)}")


if __name__ == "__main__":
    main()
