"""Give every figure of lowtide the same look: colours, type, grid, and names above the lines.

    with figures.figure(10, 4.2) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(x, y, color=figures.COLORS["lowtide"], label="lowtide")
        figures.names_above(left)
        figures.save(figure, Path("figure.png"))  # or .svg

No window is opened, and no state of pyplot changes.
"""

import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.tools import files
from lowtide.tools.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ENDINGS = (".svg", ".png")
INK, EDGE, GRID = "#343a40", "#ced4da", "#e9ecef"

# lowtide and its first comparison have the strongest colours; a variant has its kind's.
COLORS = {
    "lowtide": "#0b7285",
    "eager": "#e8590c",
    "compile": "#7048e8",
    "torch-chunked": "#1c7ed6",
    "liger": "#2f9e44",
    "cut-cross-entropy": "#c2255c",
    "quack": "#b08900",
    "sdpa": "#e8590c",
    "flex": "#7048e8",
    "varlen": "#1c7ed6",
    "xformers": "#2f9e44",
    "flash-attn": "#c2255c",
}

STYLE = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.edgecolor": EDGE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlepad": 12,
    "figure.constrained_layout.w_pad": 0.15,
    "figure.constrained_layout.h_pad": 0.15,
    "savefig.dpi": 160,
    "svg.hashsalt": "lowtide",  # The same drawing gives the same file.
}


@contextlib.contextmanager
def figure(width: float, height: float) -> Iterator["Figure"]:
    """Yield an empty figure, to be filled and saved within the block.

    Sizes are in inches of 160 pixels.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        yield Figure(figsize=(width, height), layout="constrained")


def check_picture(path: Path) -> None:
    """Raise a UserError if no figure can be saved under this name, or none can be drawn."""
    if path.suffix.lower() not in ENDINGS:
        raise UserError(f"{path} is no name for a picture: give one that ends in {' or '.join(ENDINGS)}")
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib; install it with: pip install '.[plot]' in lowtide's clone")


def save(figure: "Figure", path: Path) -> None:
    """Save the figure, completely or not at all; the same drawing gives the same file."""
    check_picture(path)
    ending = path.suffix.lower()[1:]
    with files.whole_file(path) as file:
        figure.savefig(file, format=ending, metadata={"Date": None} if ending == "svg" else None)


def names_above(axes: "Axes") -> None:
    """Write the lines' names in their colours between title and panel, where nothing is drawn."""
    axes.set_title(axes.get_title("left"), pad=30)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=len(axes.get_legend_handles_labels()[1]),
        frameon=False,
        borderpad=0,
        handlelength=0.8,
        labelcolor="linecolor",
        prop={"weight": "bold"},
    )
