"""Give every table on the terminal the same look."""

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.table import Table


def new_table(
    title: str | None, names: Iterable[str] = (), figures: Iterable[str] = (), **look: Any
) -> Table:
    """Return a table with a column for each heading: words first, then figures on the right.

    `look` are further arguments of rich's Table.
    """
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", **look)
    for heading in names:
        table.add_column(heading)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table
