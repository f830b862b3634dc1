"""Define what both proxies for tensors share.

Torch functions, methods and Python's operators on a proxy all arrive in its class's `call`.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Python looks operators up on the type. torch uses the same names for its operators.
BINARY = (
    *("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift", "sub", "truediv"),
    "xor",
)
IN_PLACE = ("setitem", *(f"i{name}" for name in BINARY))
OTHERS = (
    *("abs", "bool", "complex", "contains", "eq", "float", "ge", "gt", "index", "int", "invert", "le", "lt"),
    *("ne", "neg", "pos"),
)
OPERATORS = (*BINARY, *(f"r{name}" for name in BINARY), *IN_PLACE, *OTHERS)
OWNERS = (torch, Tensor, torch.nn.functional, torch.autograd)


class Proxy:
    """Stand for a tensor."""

    @classmethod
    def call(cls, function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call a torch function some of whose arguments are proxies of this class."""
        raise NotImplementedError

    def attribute(self, name: str) -> Any:
        """Return an attribute of the tensor that is not a method."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.call(function, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name[:2] == "__":
            raise AttributeError(f"{name!r}: not an attribute of a tensor")
        method = getattr(Tensor, name, None)
        if callable(method):
            return lambda *args, **kwargs: self.call(method, (self, *args), kwargs)
        return self.attribute(name)

    def __getitem__(self, index: Any) -> Any:
        return self.call(Tensor.__getitem__, (self, index), {})

    def __len__(self) -> int:
        return int(self.shape[0])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[row] for row in range(len(self))])

    __hash__ = object.__hash__


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: type(self).call(getattr(Tensor, name), (self, *args), {})


for _name in (f"__{name}__" for name in OPERATORS):
    if hasattr(Tensor, _name):
        setattr(Proxy, _name, _operator(_name))


def is_torchs(function: Callable[..., Any], name: str) -> bool:
    """Return whether this is torch's function of that name, not another library's namesake."""
    if torch.compiler.is_compiling():  # Dynamo cannot compare functions by identity.
        return True
    return any(getattr(owner, name, None) is function for owner in OWNERS)


def is_in_place(name: str) -> bool:
    """Return whether the function changes numbers of its first argument: mul_, __setitem__, ...

    torch calls the operator /= __idiv__.
    """
    if name[:2] == "__":
        return name[2:-2] in (*IN_PLACE, "idiv")
    return name[-1] == "_" and name != "requires_grad_"


def spelled(name: str) -> str:
    """Return the name as users write it: torch.sin, Tensor.__getitem__."""
    if name[:2] != "__":
        for place, owner in (("torch", torch), ("torch.nn.functional", torch.nn.functional)):
            if callable(getattr(owner, name, None)):  # torch.cpu is a module.
                return f"{place}.{name}"
    return f"Tensor.{name}"


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
