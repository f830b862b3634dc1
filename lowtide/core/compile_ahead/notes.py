"""Note the steps of a rehearsal, in place of taking them."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

_steps: ContextVar[list[Any] | None] = ContextVar("the steps of a rehearsal", default=None)


def in_rehearsal() -> bool:
    """Return True if steps are only noted."""
    return _steps.get() is not None


def note(step: Any) -> bool:
    """Note a step in a rehearsal; return False outside of one."""
    steps = _steps.get()
    if steps is not None:
        steps.append(step)
    return steps is not None


@contextlib.contextmanager
def noting(steps: list[Any]) -> Iterator[None]:
    """Note the steps of this block in a list."""
    token = _steps.set(steps)
    try:
        yield
    finally:
        _steps.reset(token)
