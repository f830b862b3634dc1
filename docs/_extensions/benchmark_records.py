"""Read rows of benchmarks/*.csv, and say what each was measured with."""

import csv
from collections.abc import Mapping
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
Record = dict[str, str]


def is_absent(file: str, options: Mapping[str, str]) -> bool:
    """Return whether the directive says what stands for rows that are not there, and none is."""
    if "absent" not in options:
        return False
    return not (BENCHMARKS / file).exists() or not _chosen(file, options.get("where", ""))


def _chosen(file: str, where: str) -> list[Record]:
    with (BENCHMARKS / file).open(newline="") as lines:
        found = list(csv.DictReader(lines))
    for condition in where.split():
        field, _, values = condition.partition("=")
        found = [record for record in found if record[field] in values.split("|")]
    return found


def records_of(file: str, where: str, rows: str = "") -> list[Record]:
    """Return the records whose fields have these values, `a=1|2 b=3`; in the order of `rows`."""
    found = _chosen(file, where)
    names = [name.strip() for name in rows.split(",") if name.strip()]
    if names:
        missing = set(names) - {record["provider"] for record in found}
        if missing:
            raise ValueError(f"{file} has no row of {sorted(missing)} where {where}")
        found = sorted(
            (record for record in found if record["provider"] in names),
            key=lambda record: names.index(record["provider"]),
        )
    if not found:
        raise ValueError(f"{file} has no row where {where}")
    return found


def describe(record: Record, command: str, file: str) -> str:
    """Say in one line what a record was measured with."""
    command = record.get("command") or command
    commit = record["lowtide"].rpartition("+g")[2][:7]
    triton = f", Triton {record['triton']}" if record["triton"] else ""
    place = f"{record['card']}, torch {record['torch']}{triton}"
    return f"{command} · commit {commit} · {place} · {record['date'][:10]} · benchmarks/{file}"


class Runs:
    """Number the runs that a table's rows are of, in the order of their first number."""

    def __init__(self, file: str, command: str) -> None:
        self.file, self.command = file, command
        self.found: dict[tuple[str, str, str], tuple[int, Record]] = {}

    def number(self, record: Record) -> int:
        key = (record["lowtide"], record["date"], record.get("command") or "")
        return self.found.setdefault(key, (len(self.found) + 1, record))[0]

    def described(self) -> list[tuple[int, str, str]]:
        """Return each run's number, command, and the rest of what describes it."""
        lines = []
        for number, record in self.found.values():
            command, _, rest = describe(record, self.command, self.file).partition(" · ")
            lines.append((number, command, rest))
        return lines
