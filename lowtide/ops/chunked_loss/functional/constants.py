"""Find the constants that the code of head and loss_fn reaches beside its arguments.

Constants are in closures, defaults and globals, in containers, and on modules and other objects.
When a chunk is computed again, they must be the same.

Only values that the code names are examined. Of an object, these are the attributes whose names
occur in the code that gets the object, as identifiers or as strings (for getattr). So a trainer to
which a module refers is not examined if the module's code does not use it. The code of torch is not
searched. Nor are functions from other installed packages that the code refers to.
"""

import collections
import contextlib
import enum
import functools
import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Names = frozenset[str]

PLAIN = (int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, range, slice)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
SKIPPED = {"torch", "lowtide", "numpy", "triton", *sys.stdlib_module_names} - {"__main__"}
ENTRIES = frozenset({"forward", "__call__"})
ALL_CHILDREN = {"children", "modules", "named_children", "named_modules", "parameters", "_modules"}
# A container of more elements is not examined; an array of more kilobytes is compared by its id.
MOST = 1000
MOST_VALUES = 20_000  # values that are examined; further ones are not


class Version:
    """Hold a tensor and its version, to compare them with those of another time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, 0 if tensor.is_inference() else tensor._version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Version) and self.tensor is other.tensor and self.version == other.version

    __hash__ = object.__hash__


def constants(named: Mapping[str, Any], known: Collection[int]) -> dict[str, Any]:
    """Return the constants that these values reach, by name, in a form that == compares.

    `known` has the ids of tensors that are checked elsewhere.
    """
    found = dict[str, Any]()
    seen = dict[tuple[int, Names], Any]()
    waiting = [(name, value, Names()) for name, value in named.items()]
    for _ in range(MOST_VALUES):
        if not waiting:
            break
        name, value, names = waiting.pop()
        if isinstance(value, Tensor):
            if id(value) not in known:
                found[name] = Version(value)
        elif isinstance(value, PLAIN):
            # Compare the text of a number, because NaN is not equal to NaN.
            found[name] = value if isinstance(value, (str, bytes)) else repr(value)
        elif type(value).__module__ == "numpy":
            found[name] = _array(value)
        elif (id(value), names) not in seen:
            seen[id(value), names] = value
            waiting += [(name + inner, each, own) for inner, each, own in _inside(value, names)]
    return found


def _inside(value: Any, names: Names) -> Iterator[tuple[str, Any, Names]]:
    """Yield each value inside a value, as (what to append to the name, inner value, inner names).

    `names` are the names that occur in the code that gets the value. The inner names are those in
    the code that gets the inner value.
    """
    if callable(value) and hasattr(value, "__wrapped__"):
        yield "", value.__wrapped__, names
    elif isinstance(value, functools.partial):
        yield "", value.func, names
        for key, each in (*enumerate(value.args), *value.keywords.items()):
            yield f".{key}", each, names
    elif inspect.ismethod(value):
        function = inspect.unwrap(value.__func__)
        code = getattr(function, "__code__", None)
        yield "", value.__self__, names if code is None else names | _names(code)
        yield "", function, names
    elif inspect.isfunction(value):
        if _package(value.__module__) not in SKIPPED:
            yield from _of_function(value)
    elif isinstance(value, CONTAINERS):
        if len(value) <= MOST:
            for key, each in value.items() if isinstance(value, dict) else enumerate(value):
                yield f"[{key!r}]", each, names
    elif isinstance(value, types.ModuleType):
        if _package(value.__name__) not in SKIPPED:
            for key in names & vars(value).keys():
                yield f".{key}", vars(value)[key], names
    elif isinstance(value, type):
        if _package(value.__module__) not in SKIPPED:
            for owner, key in _Members(value, names).constants:
                yield f".{key}", vars(owner).get(key), names
    else:
        yield from _of_object(value, names)


def _of_function(function: Any) -> Iterator[tuple[str, Any, Names]]:
    """Yield what a function's closure, defaults and globals hold under the names in its code."""
    code = function.__code__
    names = _names(code)
    for key, cell in zip(code.co_freevars, function.__closure__ or ()):
        with contextlib.suppress(ValueError):  # the cell is still empty
            yield f".{key}", cell.cell_contents, names
    defaults = function.__defaults__ or ()
    first = code.co_argcount - len(defaults)
    for key, each in (*zip(code.co_varnames[first:], defaults), *(function.__kwdefaults__ or {}).items()):
        yield f".{key}", each, names
    for key in names & function.__globals__.keys():
        each = function.__globals__[key]
        # A function of another installed package is not searched.
        if (
            not inspect.isfunction(each)
            or _package(each.__module__) == _package(function.__module__)
            or "site-packages" not in each.__code__.co_filename
        ):
            yield f".{key}", each, names


def _of_object(value: Any, names: Names) -> Iterator[tuple[str, Any, Names]]:
    """Yield the attributes and the methods of an object that `names` reach."""
    cls: Any = type(value)
    members = _Members(cls, names)
    own = getattr(value, "__dict__", {})
    for key in members.names & own.keys():
        yield f".{key}", own[key], members.names
    for key in members.slots:
        if hasattr(value, key):
            yield f".{key}", getattr(value, key), members.names
    for owner, key in members.constants:
        if key not in own:
            yield f".{key}", vars(owner).get(key), members.names
    for method in members.methods:
        yield "", method, members.names
    if isinstance(value, nn.Module):
        # Yield all children of torch's own modules, and of a module whose code asks for all.
        every = _package(cls.__module__) == "torch" or not ALL_CHILDREN.isdisjoint(members.names)
        yield ".training", value.training, members.names
        for held in (value._parameters, value._buffers, value._modules):
            for key, each in held.items():
                if every or key in members.names:
                    yield f".{key}", each, members.names


@functools.lru_cache(maxsize=1024)
class _Members:
    """Hold the members of a class that the names reach, directly or through its methods' code."""

    def __init__(self, cls: type, names: Names) -> None:
        self.methods, self.slots, self.constants = list[Any](), list[str](), list[tuple[type, str]]()
        waiting, seen = {*names, *ENTRIES}, set[str]()
        while waiting:
            name = waiting.pop()
            seen.add(name)
            owner = next((base for base in cls.__mro__ if name in vars(base)), None)
            if owner is None:
                continue
            member = vars(owner)[name]
            function = _function(member)
            if function is not None:
                # Of the methods of torch's classes, follow only those in ENTRIES, which compute.
                # The others share names with methods of tensors, such as `float`.
                if name in ENTRIES or _package(function.__module__) not in SKIPPED:
                    self.methods.append(function)
                    waiting |= _names(function.__code__) - seen
            elif inspect.ismemberdescriptor(member):
                self.slots.append(name)
            elif not hasattr(member, "__get__") and not name.startswith("__"):
                self.constants.append((owner, name))
        self.names = frozenset(seen)


def _function(member: Any) -> Any:
    """Return the function behind a method or a property; None for anything else."""
    for inner in ("fget", "func", "__func__"):
        member = getattr(member, inner, None) or member
    member = inspect.unwrap(member) if callable(member) else member
    return member if inspect.isfunction(member) else None


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> Names:
    """Return all names in the code, attributes and inner functions included."""
    found = {*code.co_names, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            found.add(constant)
    return frozenset(found)


def _array(value: Any) -> Any:
    """Return the contents of a small array, or the id of a large one."""
    if not hasattr(value, "tobytes") or value.nbytes > 1000 * MOST:
        return id(value)
    return str(value.dtype), value.shape, value.tobytes()


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]
