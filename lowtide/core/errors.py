"""Define the classes of errors for arguments and names, and give advice in them.

All are RuntimeErrors as well, because torch raises a RuntimeError for most such arguments. If a
caller uses another library's name of an argument, or its position, the error says what ours is.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class ArgumentError(ValueError, RuntimeError):
    """Report a value or a shape that does not fit."""


class ArgumentTypeError(TypeError, RuntimeError):
    """Report a type or a dtype that does not fit."""


class AbsentNameError(AttributeError, RuntimeError):
    """Report a name that another library's class has, and that ours lacks."""


class Absent:
    """Raise an error where an attribute of a class is read, which says what to do instead.

    hasattr returns False. A subclass, or an object, may have an attribute of this name.
    """

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def __get__(self, owner: object, kind: type) -> NoReturn:
        raise AbsentNameError(f"{kind.__name__} has no {self.name}; {self.instead}")


def advises(
    instead: Mapping[str, str], usage: str, *, otherwise: str = "pass one of {known}"
) -> Callable[[Function], Function]:
    """Return a decorator that makes the error of a call that does not fit say what to pass instead.

    `instead` has advice for each name that other libraries use. For any other name the advice is
    the argument that is spelt most alike; if there is none, it is `otherwise`. There {known} stands
    for the function's arguments, and {unknown} for those names, as "a=..., b=...". `usage` follows
    Python's error where arguments are missing or too many are passed by position.
    """

    def decorate(function: Function) -> Function:
        parameters = inspect.signature(function).parameters
        named = [name for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL]
        known, shown = frozenset(named), [name for name in named if name != "self"]
        by_place = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        takes_more = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
        most = math.inf if takes_more else len(by_place)
        needed = [name for name in named if parameters[name].default is inspect.Parameter.empty]
        required = tuple(name for name in by_place if name in needed)
        by_name = tuple(name for name in needed if parameters[name].kind is inspect.Parameter.KEYWORD_ONLY)

        @functools.wraps(function)
        def run(*arguments: Any, **options: Any) -> Any:
            for name in options:
                if name not in known:
                    unknown = [each for each in options if each not in known]
                    _refuse(function.__qualname__, unknown, shown, instead, otherwise)
            if len(arguments) > most:
                _refuse_places(function, arguments, options, usage)
            for name in (*required[len(arguments) :], *by_name):
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


def _refuse(
    function: str, unknown: list[str], known: list[str], instead: Mapping[str, str], otherwise: str
) -> NoReturn:
    """Raise an error with the advice on unknown names."""
    advice, others = [], []
    for name in unknown:
        alike = difflib.get_close_matches(name, known, n=1)
        if name in instead:
            advice.append(f"for {name} {instead[name]}")
        elif alike:
            advice.append(f"for {name} pass {alike[0]}")
        else:
            others.append(name)
    if others:
        given = ", ".join(f"{name}=..." for name in others)
        advised = otherwise.format(known=", ".join(known), unknown=given)
        advice.append(f"for {' and '.join(others)} {advised}")
    raise ArgumentTypeError(
        f"{function}() got an unexpected keyword argument {unknown[0]!r}; {', '.join(advice)}"
    )
