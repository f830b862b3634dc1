"""The rooms of the package, in the order of its docstring: imports go down it."""

import re
from pathlib import Path

import pytest

from tests.test_layering import ours

PACKAGE = Path(__file__).parents[2] / "lowtide" / "chunked_loss"
ROOMS = re.findall(r"^(\w+)\.py ", (PACKAGE / "__init__.py").read_text(), re.MULTILINE)


def test_every_room_is_listed():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", *ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_down(room):
    names = [name.removeprefix("lowtide.chunked_loss.") for name in ours(PACKAGE / f"{room}.py")]
    inside = [name for name in names if not name.startswith("lowtide.")]
    assert all(ROOMS.index(name) > ROOMS.index(room) for name in inside)
    outside = {name for name in names if name.startswith("lowtide.")}
    assert outside <= {f"lowtide.linear_cross_entropy.{name}" for name in ("kernels", "rows", "scaling")} | {
        "lowtide.core.tensor_kinds",
        "lowtide.core.row_function",
    }
