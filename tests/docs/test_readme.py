"""The README is short, and its figures are those of the CSV."""

import csv
import re

from tests.docs.snippets import ROOT

README = (ROOT / "README.md").read_text()
NAMES = {
    "**lowtide**, default": "lowtide",
    "**lowtide**, `workspace=256 * 2**20`": "lowtide-256MiB",
    "eager PyTorch": "eager",
    "torch.compile": "compile",
    "Liger 0.8.5": "liger",
}
FIELDS = ("ms", "ratio", "peak_bytes", "grad_input_error")


def rows():
    with (ROOT / "benchmarks/h200/linear_cross_entropy_step.csv").open() as lines:
        return {(row["case"], row["provider"]): row for row in csv.DictReader(lines)}


def test_readme_is_short():
    assert len(README.splitlines()) <= 95


def test_readme_table():
    found = {}
    for line in re.findall(r"^\| (?!---)(.+) \|$", README, re.MULTILINE)[1:]:
        name, *numbers = line.split(" | ")
        found[name] = numbers
    expected = {}
    for name, provider in NAMES.items():
        row = rows()["B", provider]
        number = {field: float(row[field]) for field in FIELDS}
        expected[name] = [
            f"{number['ms']:.1f}",
            f"{number['ratio']:.2f}",
            f"{number['peak_bytes'] / 2**20:,.0f}",
            f"{number['grad_input_error']:.1e}",
        ]
    assert found == expected


def test_readme_comparison_with_liger():
    """Of the four large heads."""
    mine, theirs = (
        sorted(float(rows()[case, provider]["ratio"]) for case in "ABCD") for provider in ("lowtide", "liger")
    )
    said = re.search(
        r"takes ([\d.]+) to ([\d.]+) times the time of the three products .*?takes ([\d.]+) to ([\d.]+)",
        " ".join(README.split()),
    )
    assert said.groups() == tuple(f"{each:.2f}" for each in (mine[0], mine[-1], theirs[0], theirs[-1]))


def test_readme_whole_steps():
    with (ROOT / "benchmarks/h200/steps.csv").open() as lines:
        found = {(row["model"], row["provider"]): row for row in csv.DictReader(lines)}
    figures = [
        figure
        for model in ("Llama-3.2-1B", "Llama-3.1-8B")
        for row in (found[model, provider] for provider in ("lowtide", "eager", "liger"))
        for figure in (f"{float(row['tokens_per_second']):,.0f}", f"{int(row['peak_bytes']) / 2**30:.1f}")
    ]
    number, words = r"([\d.,]+)", " ".join(README.split())
    said = re.search(
        rf"trains Llama 3.2 1B with {number} tokens/s in {number} GiB \(eager {number} in {number}, Liger"
        rf" {number} in {number}\), and Llama 3.1 8B with {number} in {number} \(eager {number} in {number},"
        rf" Liger {number} in {number}\)",
        words,
    )
    assert [*said.groups()] == figures
