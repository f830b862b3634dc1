"""Register the functions that run in place of torch's functions of deferred logits."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Handler(NamedTuple):
    """Hold the function that runs in place of the torch functions of one name."""

    function: Callable[..., Any]
    keywords: frozenset[str] | None
    """The keywords that the function accepts; None for any."""
    anywhere: bool
    """True if the deferred logits need not be the first argument."""


HANDLERS: dict[str, Handler] = {}
"""Map names of torch functions to handlers; operations/ fills it."""


def handles(
    *names: str, anywhere: bool = False, pass_name: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the function in place of torch's functions and methods of these names.

    The function returns NotImplemented where it does not apply; then the logits are materialised.
    With `pass_name` it gets the name as its first argument.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            own = functools.partial(function, name) if pass_name else function
            parameters = inspect.signature(own).parameters.values()
            anything = any(each.kind is each.VAR_KEYWORD for each in parameters)
            keywords = None if anything else frozenset(each.name for each in parameters)
            HANDLERS[name] = Handler(own, keywords, anywhere)
        return function

    return register
