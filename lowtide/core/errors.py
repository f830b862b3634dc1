"""Define the two classes of errors that a call raises for an argument, and name what is meant.

Both are RuntimeErrors as well, because torch raises a RuntimeError for most such arguments. Where a
caller uses the name that another library has for an argument, the error names ours.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class ArgumentError(ValueError, RuntimeError):
    """Report a value or a shape that does not fit."""


class ArgumentTypeError(TypeError, RuntimeError):
    """Report a type or a dtype that does not fit."""


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
