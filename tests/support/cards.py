"""The marks of tests that need CUDA cards, and parameters that carry them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def needs_cards(ranks: int) -> list[pytest.MarkDecorator]:
    """The marks of a case whose ranks have a card each."""
    few = torch.cuda.device_count() < ranks
    lacking = pytest.mark.skipif(few, reason=f"needs a CUDA device for each of {ranks} ranks")
    return [pytest.mark.gpu, pytest.mark.several_cards, lacking]


def on_cards(ranks: int, *values: object, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    """The parameters of a test whose ranks have a card each; the first is "cuda"."""
    return pytest.param("cuda", *values, marks=[*needs_cards(ranks), *marks])


DEVICES = ["cpu", on_cards(2)]  # for tests of two ranks
