"""Decides which cases `make test` leaves to `make test-extended`; CI runs both.

A test with several lists of parameters runs for each combination of their values: that is most of the suite,
and most of its time. `make test` takes, of each such test, cases in which every value of every list occurs;
the others are `extended`, and so are tests that carry the mark because they take seconds.
"""

from collections.abc import Iterable
from zlib import crc32

import pytest

LEFT_OUT = ("extended", "every_build")


def mark_extended(items: Iterable[pytest.Item]) -> None:
    """Mark the cases whose values all occur in others, in the same way in every run and process."""
    covered: set[tuple[object, ...]] = set()
    # In an order without meaning, or the first value of each list would be in most of those that stay.
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        if any(item.get_closest_marker(name) for name in LEFT_OUT):
            continue
        values = _values(item)
        if values and values <= covered:
            item.add_marker("extended")
        covered |= values


def _values(item: pytest.Item) -> set[tuple[object, ...]]:
    """The values of a case, each with its list. Those of cases for a card are others: it may be absent."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return set()
    test = item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None
    return {(test, place, value) for place, value in enumerate(spec._idlist)}
