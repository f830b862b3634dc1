"""Write a number of bytes in the unit that suits it."""

KIB, MIB, GIB = 2**10, 2**20, 2**30


def unit_of(size: float, at_least: int = 1) -> tuple[int, str]:
    """Return the largest unit that `size` has at least `at_least` of, and its name."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= at_least * unit:
            return unit, name
    return 1, "bytes"


def readable(size: float, digits: str, at_least: int = 1) -> str:
    """Return a number of bytes in the unit of `unit_of`, formatted as `digits` says: "7.50 MiB"."""
    unit, name = unit_of(size, at_least)
    return f"{size / unit:{digits}} {name}"
