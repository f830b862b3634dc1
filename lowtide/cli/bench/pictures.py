"""Draw what a CSV of the benchmark holds: a sweep, heads or attention of public models."""

from pathlib import Path

from lowtide.tools import figures, files
from lowtide.tools.bench import draw as sweep
from lowtide.tools.bench.attention import real_table
from lowtide.tools.bench.heads import table as heads

RATIOS = {  # The columns that tell a file from others.
    "heads": (("head", *heads.FLOORS), heads),
    "attention": (("best_of_torch", *real_table.RATIOS), real_table),
}


def draw(path: Path, out: Path) -> None:
    """Draw the CSV at `path`; the same file gives the same picture."""
    figures.check_picture(out)
    with open(path, encoding="utf-8", errors="replace") as file:
        columns = file.readline().strip().split(",")
    for kind, (own, table) in RATIOS.items():
        if own[0] in columns:
            needed = (*own, "card", "torch", "dtype", "lowtide", "provider", "status")
            table.draw(files.read_table(path, needed, kind), out)
            return
    sweep.draw(path, out)
