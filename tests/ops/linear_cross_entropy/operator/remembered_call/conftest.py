"""Fixtures: by which way calls go."""

import pytest

from lowtide.ops.linear_cross_entropy.operator import ops, signatures
from tests.support.loss import interpreted
from tests.support.rehearsals import in_rehearsal


@pytest.fixture(autouse=True)
def interpreter(device):
    if device == "cpu" and not interpreted():
        pytest.skip("needs Triton's interpreter")


@pytest.fixture
def went(monkeypatch):
    """By which way each call went: "operator", or "straight"."""
    found, run, planned = [], signatures.run, ops._planned

    def count_straight(*arguments):
        loss = run(*arguments)
        found.extend([] if loss is None else ["straight"])
        return loss

    def count_planned(*arguments, **options):
        if not in_rehearsal():
            found.append("operator")
        return planned(*arguments, **options)

    monkeypatch.setattr(signatures, "run", count_straight)
    monkeypatch.setattr(ops, "_planned", count_planned)
    return found
