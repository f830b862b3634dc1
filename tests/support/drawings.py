"""What a drawing must not do: print its words over each other, over lines, or beyond its edge."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


@dataclass
class Drawing:
    figure: Figure
    words: list[tuple[str, Bbox]]  # all that are printed, and where

    def check(self) -> None:
        for place, (text, box) in enumerate(self.words):
            assert _within(box, self.figure.bbox), text
            for other, its in self.words[:place]:
                assert not box.overlaps(its), (text, other)
            for axes in self.figure.axes:
                for line in axes.lines:
                    path = line.get_transform().transform_path(line.get_path())
                    assert not path.intersects_bbox(box, filled=False), (text, line.get_label())

    def is_in_a_panel(self, text: str) -> bool:
        (box,) = (box for one, box in self.words if text in one)
        return any(_within(box, axes.bbox) for axes in self.figure.axes)


def _within(box: Bbox, outer: Bbox) -> bool:
    horizontally = outer.x0 <= box.x0 and box.x1 <= outer.x1
    return horizontally and outer.y0 <= box.y0 and box.y1 <= outer.y1


def drawn(monkeypatch: Any, draw: Callable[[Path], None], path: Path) -> Drawing:
    """The figure that `draw` saves."""
    figures = []
    words: list[tuple[str, Bbox]] = []
    save, draw_text = Figure.savefig, Text.draw

    def keep(figure: Figure, *args: Any, **options: Any) -> None:
        save(figure, *args, **options)
        with monkeypatch.context() as patch:
            patch.setattr(Text, "draw", look)
            figure.draw_without_rendering()
        figures.append(figure)

    def look(text: Text, renderer: Any) -> None:
        draw_text(text, renderer)
        if text.get_visible() and text.get_text():
            words.append((text.get_text(), Text.get_window_extent(text, renderer)))

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", keep)
        draw(path)
    (figure,) = figures
    return Drawing(figure, words)
