"""Share what both proxies need: Python's operators, and the search for proxies in arguments."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# Python looks operators up on the type. torch calls them by these names, too.
BINARY = (
    *("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv"),
    "xor",
)
REFLECTED = tuple(f"r{name}" for name in BINARY)
IN_PLACE = ("setitem", *(f"i{name}" for name in BINARY))
OTHERS = (
    *("abs", "bool", "complex", "contains", "eq", "float", "ge", "gt", "index", "int", "invert", "le", "lt"),
    *("ne", "neg", "pos"),
)
OWNERS = (torch, Tensor, torch.nn.functional, torch.autograd)


def add_operators(kind: type, names: tuple[str, ...], call: Callable[..., Any]) -> None:
    """Give the type these operators: call(Tensor's own, arguments, {})."""

    def operator(name: str) -> Callable[..., Any]:
        return lambda *args: call(getattr(Tensor, name), args, {})

    for name in names:
        if hasattr(Tensor, f"__{name}__"):
            setattr(kind, f"__{name}__", operator(f"__{name}__"))


def is_torchs(function: Callable[..., Any], name: str) -> bool:
    """Return whether this is torch's function of that name, not another library's namesake."""
    if torch.compiler.is_compiling():  # Dynamo cannot compare functions by identity.
        return True
    return any(getattr(owner, name, None) is function for owner in OWNERS)


def is_in_place(name: str) -> bool:
    """Return whether the function changes its first argument: mul_, __imul__, __setitem__, ...

    The operator /= calls itself __idiv__.
    """
    return name[2:-2] in (*IN_PLACE, "idiv") if name[:2] == "__" else name[-1] == "_"


def spelled(name: str) -> str:
    """Return the name as code has it: torch.sin, Tensor.__getitem__."""
    places = {"torch": torch, "torch.nn.functional": torch.nn.functional}
    found = (f"{at}.{name}" for at, owner in places.items() if hasattr(owner, name))
    return f"Tensor.{name}" if name[:2] == "__" else next(found, f"Tensor.{name}")


def flat(value: Any) -> list[Any]:
    """List the leaves of a value made of lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    return [leaf for each in value for leaf in flat(each)] if isinstance(value, (list, tuple)) else [value]


def replaced(value: Any, kind: type, by: Callable[[Any], Any]) -> Any:
    """Return the same value with `by(each)` in place of each instance of `kind`."""
    if isinstance(value, kind):
        return by(value)
    if isinstance(value, dict):
        return {key: replaced(each, kind, by) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(replaced(each, kind, by) for each in value)
    return value
