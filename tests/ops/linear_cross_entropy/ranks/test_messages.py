"""Messages between hosts: none in a rehearsal."""

from types import SimpleNamespace

import pytest

from lowtide.core.compile_ahead.notes import noting
from lowtide.ops.linear_cross_entropy.ranks import messages


def test_none_in_a_rehearsal():
    """The other ranks would wait for ever, or for another message."""
    steps = []
    with noting(steps), pytest.raises(RuntimeError, match="would speak to them"):
        messages.exchange(SimpleNamespace(size=2), {"operator": "linear_cross_entropy"})
    assert steps == []
