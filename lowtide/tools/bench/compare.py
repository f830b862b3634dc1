"""Compare the figures of two CSVs of the benchmarks, row by row."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from lowtide.tools import files
from lowtide.tools.errors import UserError

CASE = (
    *("model", "case", "ranks", "batch", "batches", "length", "heads", "key_heads", "queries", "keys"),
    *("tokens", "features", "value_features", "classes", "dtype", "mode", "options", "optimizer"),
    *("checkpointing", "logits", "ignored", "fsdp", "tp", "shard_head"),
    *("workspace", "loss", "provider", "operator"),
)
"""Columns that say what was measured: rows that agree in these are compared."""
FIGURES = (
    *("ms", "ratio", "forward_ms", "forward_ratio", "backward_ms", "backward_ratio", "step_ratio"),
    *("peak_bytes", "measured_bytes", "forward_us", "backward_us"),
)
"""Columns that are compared. Errors are left out: tests hold them to a budget."""
SURROUNDINGS = ("card", "clocks", "torch", "triton", "lowtide")


class Change(NamedTuple):
    """Describe one figure of one row, before and after."""

    row: str
    figure: str
    before: float
    after: float

    @property
    def percent(self) -> float:
        return 100 * (self.after / self.before - 1)


class Comparison(NamedTuple):
    """Hold what two files say of the same rows."""

    changes: list[Change]
    """Every figure that both files have, changed or not."""
    unmatched: list[str]
    """Rows that only one file has, or that ran in one alone, with the reason."""
    surroundings: list[str]
    """Names what else differs between the files and may have changed the figures."""

    def beyond(self, percent: float) -> list[Change]:
        return [change for change in self.changes if abs(change.percent) > percent]


def compare(before: Path, after: Path) -> Comparison:
    """Compare the rows that two files share.

    Raises:
        UserError: if a file is no CSV of a benchmark, if a row is there twice, or if the files
            share no figure.
    """
    olds, news = _read(before), _read(after)
    changes, unmatched = [], []
    for row in {**olds, **news}:
        old, new = olds.get(row), news.get(row)
        if old is None or new is None:
            unmatched.append(f"{row}: only in {after if old is None else before}")
        elif _status(old) != _status(new):
            unmatched.append(f"{row}: {_status(old)} before, {_status(new)} after")
        else:
            changes += [
                Change(row, figure, float(old[figure]), float(new[figure]))
                for figure in FIGURES
                if _is_number(old.get(figure)) and _is_number(new.get(figure))
            ]
    if not changes and not unmatched:
        raise UserError(f"{before} and {after} have no figures in common")
    return Comparison(changes, unmatched, _surroundings(olds.values(), news.values()))


def _read(path: Path) -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = {}
    for row in files.read_table(path, ("card",), "lowtide bench"):
        if not any(figure in row for figure in FIGURES):
            raise UserError(f"{path} has none of the columns {', '.join(FIGURES)}")
        name = " ".join(row[column] for column in CASE if row.get(column))
        if name in rows:
            raise UserError(f"{path} has two rows of {name}; compare files with one row of each")
        rows[name] = row
    return rows


def _status(row: dict[str, str]) -> str:
    return row.get("status") or "ok"


def _is_number(cell: str | None) -> bool:
    """Return True for a figure that can be compared; "out of memory" and 0 bytes cannot."""
    try:
        return cell is not None and float(cell) > 0
    except ValueError:
        return False


def _surroundings(olds: Iterable[dict[str, str]], news: Iterable[dict[str, str]]) -> list[str]:
    found = []
    for column in SURROUNDINGS:
        old, new = ({row[column] for row in rows if row.get(column)} for rows in (olds, news))
        if old and new and old != new:
            found.append(f"{column}: {', '.join(sorted(old))} before, {', '.join(sorted(new))} after")
    return found
