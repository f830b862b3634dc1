"""Counts the recordings that ran (lowtide/core/recording); it needs Triton."""

from typing import Any

import pytest

from lowtide.core.recording import recorded


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that gets each recording as it runs."""
    found: list[Any] = []
    run = recorded.Recording.run

    def counted(self: Any, tensors: Any) -> Any:
        found.append(self)
        return run(self, tensors)

    monkeypatch.setattr(recorded.Recording, "run", counted)
    return found
