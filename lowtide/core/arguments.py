"""Name the argument that is meant where a caller uses the name that another library has for it."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lowtide.core.errors import ArgumentTypeError

Function = TypeVar("Function", bound=Callable[..., Any])


def advises_on_names(instead: Mapping[str, str]) -> Callable[[Function], Function]:
    """Return a decorator whose error about an unknown argument says what to pass instead.

    `instead` has the sentence for each name that other libraries use. For any other name it is the
    argument that is spelt most alike, or Python's own error.
    """

    def decorate(function: Function) -> Function:
        known = frozenset(inspect.signature(function).parameters)

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    unknown = [each for each in options if each not in known]
                    _refuse(function.__qualname__, unknown, known, instead)
            return function(*arguments, **options)

        return run  # type: ignore[return-value]

    return decorate


def _refuse(function: str, unknown: list[str], known: frozenset[str], instead: Mapping[str, str]) -> None:
    """Raise if there is advice on one of the names; Python's own error names the first of them."""
    advice = []
    for name in unknown:
        alike = difflib.get_close_matches(name, known, n=1)
        if name in instead:
            advice.append(f"for {name} {instead[name]}")
        elif alike:
            advice.append(f"for {name} pass {alike[0]}")
    if advice:
        raise ArgumentTypeError(
            f"{function}() got an unexpected keyword argument {unknown[0]!r}; {', '.join(advice)}"
        )
