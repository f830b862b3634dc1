"""Find the diagonals that a mask function shows, by calling it once with two symbols as indices.

Transformers represents a mask as a function of a query's place i and a key's place j, `(j > i -
window) & (j <= i)`, and evaluates it at every (i, j). Here the function is called with symbols
that know their coefficients of i and j. The result is exactly a band, -left <= j - i <= right, or
an error (decision 0027).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class NotABand(TypeError):
    """Signal that the mask function depends on more than the difference of the two places."""


class Symbol:
    """Refuse a truth value: `a and b` and `if a` would silently choose one side."""

    def __bool__(self) -> bool:
        raise NotABand


@dataclass(frozen=True)
class Shown(Symbol):
    """Represent the keys -left <= j - i <= right that query i sees; None means no limit."""

    left: int | None = None
    right: int | None = None
    device = None

    def __and__(self, other: object) -> Shown:
        if not isinstance(other, Shown):
            raise NotABand
        return Shown(_smaller(self.left, other.left), _smaller(self.right, other.right))

    def to(self, _: object) -> Shown:
        return self


@dataclass(frozen=True, eq=False)
class Place(Symbol):
    """Represent i_times * i + j_times * j + plus."""

    i_times: int
    j_times: int
    plus: int = 0

    def __eq__(self, other: object) -> bool:
        raise NotABand

    __hash__ = None  # type: ignore[assignment]

    def new_ones(self, *_: object, **__: object) -> Shown:
        return Shown()

    def __add__(self, other: object) -> Place:
        other = _place(other)
        return Place(self.i_times + other.i_times, self.j_times + other.j_times, self.plus + other.plus)

    def __sub__(self, other: object) -> Place:
        other = _place(other)
        return Place(self.i_times - other.i_times, self.j_times - other.j_times, self.plus - other.plus)

    def __abs__(self) -> Distance:
        return Distance(self)

    def __le__(self, other: object) -> Shown:
        return _at_most_zero(self - other)

    def __lt__(self, other: object) -> Shown:
        return _at_most_zero(self - other + 1)

    def __ge__(self, other: object) -> Shown:
        return _at_most_zero(_place(other) - self)

    def __gt__(self, other: object) -> Shown:
        return _at_most_zero(_place(other) - self + 1)


@dataclass(frozen=True)
class Distance(Symbol):
    """Represent the absolute value of a place."""

    signed: Place

    def __le__(self, other: int) -> Shown:
        return (self.signed <= other) & (self.signed >= -other)

    def __lt__(self, other: int) -> Shown:
        return self <= other - 1


def band(mask_function: Callable[..., Any]) -> Shown | None:
    """Return the band that mask_function(batch, head, i, j) shows, or None if it shows no band."""
    try:
        found = mask_function(None, None, Place(1, 0), Place(0, 1))
    except Exception:  # Symbols are not tensors: a function that fails with them is not a band.
        return None
    return found if isinstance(found, Shown) else None


def _place(value: object) -> Place:
    if isinstance(value, Place):
        return value
    if not isinstance(value, int):
        raise NotABand
    return Place(0, 0, value)


def _at_most_zero(place: Place) -> Shown:
    factors = (place.i_times, place.j_times)
    if factors == (-1, 1):  # j - i <= -plus
        return Shown(right=-place.plus)
    if factors == (1, -1):  # i - j <= -plus
        return Shown(left=-place.plus)
    if max(factors) <= 0 and place.plus <= 0:  # True for all i and j, since both are at least 0.
        return Shown()
    raise NotABand


def _smaller(one: int | None, other: int | None) -> int | None:
    return one if other is None else other if one is None else min(one, other)
