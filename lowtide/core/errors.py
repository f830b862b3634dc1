"""Define the two classes of errors that a call raises for an argument, and name what is meant.

Both are RuntimeErrors as well, because torch raises a RuntimeError for most such arguments. Where a
caller uses the name or the place that another library has for an argument, the error names ours.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class ArgumentError(ValueError, RuntimeError):
    """Report a value or a shape that does not fit."""


class ArgumentTypeError(TypeError, RuntimeError):
    """Report a type or a dtype that does not fit."""


def advises(instead: Mapping[str, str], usage: str) -> Callable[[Function], Function]:
    """Return a decorator whose error about a call that does not fit says what to pass instead.

    `instead` has the sentence for each name that other libraries use; for any other name it is the
    argument that is spelt most alike, or Python's own error. `usage` follows Python's error where
    arguments are missing or too many are passed by position.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        known = frozenset(parameters)
        by_place = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        takes_more = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
        most = math.inf if takes_more else len(by_place)
        required = tuple(name for name in by_place if parameters[name].default is inspect.Parameter.empty)

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    unknown = [each for each in options if each not in known]
                    _refuse(function.__qualname__, unknown, known, instead)
            if len(arguments) > most:
                _refuse_places(function, arguments, options, usage)
            for name in required[len(arguments) :]:
                if name not in options:
                    _refuse_places(function, arguments, options, usage)
            return function(*arguments, **options)

        return run  # type: ignore[return-value]

    return decorate


def _refuse_places(
    function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any], usage: str
) -> None:
    """Raise Python's own error about the number of arguments, and the usage."""
    try:
        inspect.unwrap(function)(*arguments, **options)
    except TypeError as error:
        raise ArgumentTypeError(f"{error}; {usage}") from None


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
