"""Summarise benchmarks/h200/heads.csv and attention_real.csv, and show their pictures.

A summary has a line for each aim: a ratio with a limit, the median over the cases that it is about,
and the worst. A case counts where both sides of the ratio ran.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import benchmark_records
from benchmark_records import Record, is_absent, records_of
from data_tables import add_makers, markdown
from sphinx.application import Sphinx

ABSENT = "Not measured yet."
PICTURES = Path(__file__).parents[1] / "pictures"
GIB = 2**30
DEFAULT, SMALL = "lowtide", "lowtide-256MiB"


class Aim(NamedTuple):
    """Define a line of a summary."""

    name: str
    limit: float
    ratios: Sequence[tuple[float, str]]
    """Holds the value of each case that counts, with its name."""

    def cells(self) -> list[str]:
        if not self.ratios:
            return [self.name, f"{self.limit:.2f}", "0", "–", "–", ""]
        values = [ratio for ratio, _ in self.ratios]
        worst, case = max(self.ratios)
        kept = sum(value <= self.limit for value in values)
        return [
            self.name,
            f"{self.limit:.2f}",
            f"{kept} of {len(values)}",
            f"{statistics.median(values):.2f}",
            f"{worst:.2f}",
            case,
        ]


def _table(aims: Iterable[Aim]) -> str:
    heading = ["ratio", "at most", "within it", "median", "worst", "at"]
    return markdown(heading, [aim.cells() for aim in aims], "--:")


def _by_case(file: str) -> list[dict[str, Record]]:
    """Return, of each case, the rows that ran by their provider."""
    cases: dict[str, dict[str, Record]] = {}
    for record in records_of(file, "status=ok"):
        cases.setdefault(record["case"], {})[record["provider"]] = record
    return list(cases.values())


def heads_summary() -> str:
    """Return the aims of the loss on heads of public models."""
    file = "h200/heads.csv"
    if is_absent(file, {"absent": ABSENT, "where": "status=ok"}):
        return ABSENT
    cases = _by_case(file)

    def own(provider: str, field: str, chosen: Callable[[int, int], bool], tokens: int) -> list:
        return [
            (float(row[field]), row["case"])
            for rows in cases
            if (row := rows.get(provider)) is not None
            and int(row["tokens"]) >= tokens
            and chosen(int(row["features"]), int(row["classes"]))
        ]

    others, memory, predicted = [], [], []
    for rows in cases:
        peers = [row for name, row in rows.items() if not name.startswith("lowtide")]
        row = rows.get(DEFAULT)
        if row is None:
            continue
        if peers and int(row["tokens"]) >= 2048 and int(row["features"]) >= 768:
            best = min(peers, key=lambda peer: float(peer["aligned_ratio"]))
            others.append((float(row["aligned_ratio"]) / float(best["aligned_ratio"]), row["case"]))
            if int(best["peak_bytes"]) > GIB:
                memory.append((int(row["peak_bytes"]) / int(best["peak_bytes"]), row["case"]))
        for each in rows.values():
            if each["predicted_ratio"]:
                off = abs(float(each["predicted_ratio"]) / float(each["aligned_ratio"]) - 1)
                predicted.append((off, f"{each['case']}, {each['provider']}"))
    few = [
        (float(rows[DEFAULT]["aligned_ratio"]), rows[DEFAULT]["case"])
        for rows in cases
        if DEFAULT in rows and rows[DEFAULT]["case"] == "Llama-3-8B-256"
    ]
    wide = own(DEFAULT, "aligned_ratio", lambda D, V: D >= 2048, 2048)
    return _table(
        [
            Aim("default over the quickest of the others (N ≥ 2048, D ≥ 768)", 1.02, others),
            Aim("its memory over that of the quickest, where that is above 1 GiB", 1.0, memory),
            Aim("default over the aligned floor (N ≥ 2048, D ≥ 2048)", 1.12, wide),
            Aim(
                "the same (N ≥ 2048, D from 768 to 2047)",
                1.15,
                own(DEFAULT, "aligned_ratio", lambda D, V: 768 <= D < 2048, 2048),
            ),
            Aim(
                "256 MiB over the aligned floor (N ≥ 2048, D ≥ 1024)",
                1.55,
                own(SMALL, "aligned_ratio", lambda D, V: D >= 1024, 2048),
            ),
            Aim("default over the floor (N 256, D 4096, V 128256)", 1.35, few),
            Aim("distance of the prediction from the ratio", 0.05, predicted),
        ]
    )


def attention_summary() -> str:
    """Return the aims of attention on shapes of public models."""
    file = "h200/attention_real.csv"
    if is_absent(file, {"absent": ABSENT, "where": "status=ok"}):
        return ABSENT
    cases = _by_case(file)
    passes = ("forward", "backward")

    def over_torch(chosen: Callable[[Record], bool]) -> list:
        return [
            (float(row[f"{each}_over_torch"]), f"{row['case']}, {each}")
            for rows in cases
            if (row := rows.get("lowtide")) is not None and chosen(row)
            for each in passes
            if row[f"{each}_over_torch"]
        ]

    def has_gradient(row: Record) -> bool:
        return bool(row["grad_bias_error"])

    def handed(row: Record) -> bool:
        return row["engine"] == "sdpa"

    flex, memory = [], []
    for rows in cases:
        row, peer = rows.get("lowtide"), rows.get("flex")
        if row is None:
            continue
        if peer is not None:
            for each in passes:
                if row[f"{each}_ms"] and peer[f"{each}_ms"]:
                    ratio = float(row[f"{each}_ms"]) / float(peer[f"{each}_ms"])
                    flex.append((ratio, f"{row['case']}, {each}"))
        if row["peak_over_torch"]:
            memory.append((float(row["peak_over_torch"]), row["case"]))
    large = over_torch(lambda row: has_gradient(row) and int(row["queries"]) >= 256)
    return _table(
        [
            Aim("time over torch's quickest", 1.05, over_torch(lambda row: True)),
            Aim("the same, with a bias that takes a gradient, M ≥ 256", 0.75, large),
            Aim(
                "the same, M < 256",
                1.0,
                over_torch(lambda row: has_gradient(row) and int(row["queries"]) < 256),
            ),
            Aim("the same, handed on to torch", 1.03, over_torch(handed)),
            Aim("memory over torch's quickest", 1.0, memory),
            Aim("time over FlexAttention, compiled", 1.0, flex),
        ]
    )


def _picture(name: str, words: str) -> str:
    """Return the image of docs/pictures that `make tables` draws, once its CSV is there."""
    there = (benchmark_records.BENCHMARKS / "h200" / f"{name}.csv").exists() and (
        PICTURES / f"{name}.png"
    ).exists()
    return f"![{words}](../pictures/{name}.png)" if there else ABSENT


MAKERS: dict[str, Callable[[], str]] = {
    "heads-summary": heads_summary,
    "heads-picture": lambda: _picture("heads", "Time over the aligned floor, by head, tokens and provider"),
    "attention-summary": attention_summary,
    "attention-picture": lambda: _picture(
        "attention_real", "Time and memory over those of torch's quickest kernel, by case and provider"
    ),
}


def setup(app: Sphinx) -> dict[str, Any]:
    files = [benchmark_records.BENCHMARKS / "h200" / f"{name}.csv" for name in ("heads", "attention_real")]
    return add_makers(app, MAKERS, files)
