"""Decides which cases `make test` leaves to `make test-extended`; CI runs both.

A test with several lists of parameters runs for each combination of their values: that is most of
the suite, and most of its time. Tests and values that carry the mark `extended` take longer than
others, which run the same code. Of each test with parameters `make test` takes, of what has no
mark, few cases in which every value of every list occurs; the others are `extended`, too.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from zlib import crc32

import pytest

LEFT_OUT = ("extended", "every_build")
Values = set[tuple[object, ...]]


def all_extended_but(kept: Collection[object], values: Iterable[object]) -> list[object]:
    """Values of a parameter, those marked `extended` that are not kept: their cases take long."""
    marked = []
    for value in values:
        several = value if isinstance(value, tuple) else (value,)
        marked.append(value if value in kept else pytest.param(*several, marks=pytest.mark.extended))
    assert all(value in marked for value in kept)
    return marked


def asked(request: pytest.FixtureRequest, name: str, kinds: Iterable[str]) -> list[str]:
    """Of these kinds, those that a test to be run in the fixture's file has by this name."""
    given = {
        item.callspec.params.get(name)
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    return [kind for kind in kinds if kind in given]


def mark_extended(items: Iterable[pytest.Item]) -> None:
    """Mark the cases whose values all occur in others, in the same way in every run and process."""
    grids: dict[object, list[tuple[pytest.Item, Values]]] = defaultdict(list)
    # Go through the tests in an order without meaning. Otherwise most of those that stay would have
    # the first value of each list.
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        values = _values(item)
        if values and not any(item.get_closest_marker(name) for name in LEFT_OUT):
            # Cases for a card are another grid: it may be absent.
            test = item.nodeid.partition("[")[0], item.get_closest_marker("gpu") is not None
            grids[test].append((item, values))
    for cases in grids.values():
        _mark_all_but_few(cases)


def _mark_all_but_few(cases: list[tuple[pytest.Item, Values]]) -> None:
    """Of the cases of one test, keep first those with the most values that no kept case has."""
    covered: Values = set()
    kept: set[str] = set()
    for new in range(max(len(values) for _, values in cases), 0, -1):
        for item, values in cases:
            if len(values - covered) == new:
                kept.add(item.nodeid)
                covered |= values
    for item, _ in cases:
        if item.nodeid not in kept:
            item.add_marker("extended")


def _values(item: pytest.Item) -> Values:
    """The values of a case, each with the place of its list."""
    spec = getattr(item, "callspec", None)
    return set() if spec is None else set(enumerate(spec._idlist))
