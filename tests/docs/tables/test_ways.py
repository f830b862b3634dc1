"""The page of ways has the words that `lowtide doctor` prints."""

import re

import pytest
import torch

from lowtide.core.bfloat16_units import gemm
from lowtide.tools.doctor.cpu import cpu
from lowtide.tools.doctor.linear_cross_entropy import WEIGHT_GRADIENTS, AskedLossCall
from tests.docs.snippets import DOCS

PAGE = " ".join((DOCS / "reference" / "ways.md").read_text().split())


@pytest.fixture
def no_units(monkeypatch):
    monkeypatch.setattr(gemm, "_has_units", lambda: False)
    monkeypatch.setattr(gemm, "_library", gemm._load_once.__wrapped__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reason_of_a_cpu_without_units(no_units, dtype):
    """Those of a call, of its cast to bfloat16, and of the processor."""
    engine, _, reasons = AskedLossCall(64, 1024, 2048, dtype=dtype).describe()["why"].partition(": ")
    for reason in reasons.split("; and "):
        assert f"| `{engine.removeprefix('not ')}` | {reason} |" in PAGE
    assert cpu()["bfloat16 products"].removeprefix("in float32: ") in PAGE


def test_each_line_is_explained(no_units):
    """Those of whole and of divided heads. Without units for bfloat16 the weight is copied."""
    names = set()
    for call in (AskedLossCall(8192, 4096, 128_256), AskedLossCall(64, 16, 64, ranks=2)):
        names |= {re.sub(r"^\d+ (?=ranks)", "2 ", name) for name in call.describe()}
    assert {"weight", "weight gradient", "2 ranks"} <= names
    assert not [name for name in {*names, "why", "predicted"} if f"| `{name}` | " not in PAGE]


@pytest.mark.parametrize("text", WEIGHT_GRADIENTS.values())
def test_each_weight_gradient_is_explained(text):
    first = re.split(r"[,{:]", text)[0].strip()
    assert f"| `{first}" in PAGE
