"""The caller's two functions as a function of tensors alone.

Autograd needs to know every tensor that a loss depends on. Those of an nn.Module are its parameters, those
of a bound method its module's, those of a functools.partial its arguments: they can be found, and replaced
while a chunk runs by detached copies that share their memory, so that no hook of theirs sees a chunk's
gradient. What a closure brings along can neither be found nor replaced; `unseen` finds it in the graph,
and it is an error.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lowtide.chunked_loss.check import ArgumentError
from lowtide.chunked_loss.sharded import forward_of

Function = Callable[..., Any]
Result = TypeVar("Result")


class Call:
    """loss_fn(head(*hidden), *arguments)."""

    def __init__(self, loss_fn: Function, head: Function, arguments: tuple[Any, ...]) -> None:
        self.loss_fn, self.head, self.arguments = loss_fn, forward_of(head), arguments
        brought = [*_brought(head, "head"), *_brought(loss_fn, "loss_fn")]
        for k, argument in enumerate(arguments):
            brought += _brought(argument, f"token_tensors[{k}]")
        self.modules = {name: each for name, each in brought if isinstance(each, nn.Module)}
        tensors = [(name, each) for name, each in brought if isinstance(each, Tensor)]
        for prefix, module in self.modules.items():
            parameters = module.named_parameters(remove_duplicate=False)
            tensors += [(f"{prefix}.{name}", parameter) for name, parameter in parameters]
        places: dict[int, int] = {}
        learned: list[Tensor] = []
        self.names: list[str] = []
        for name, tensor in tensors:
            if tensor.requires_grad and id(tensor) not in places:
                places[id(tensor)] = len(learned)
                learned.append(tensor)
                self.names.append(name)
        self.learned = tuple(learned)
        """What needs a gradient, each once, however often it is tied."""
        self._places = places
        self._stage = _Stage(self.modules.values())
        self._swapped = {
            name: places[id(parameter)]
            for name, parameter in self._stage.named_parameters(remove_duplicate=False)
            if id(parameter) in places
        }

    def __call__(self, hidden: Iterable[Tensor], rows: Iterable[Tensor], learned: tuple[Tensor, ...]) -> Any:
        """(what the head gave, what loss_fn gave), within `within`; `rows` take the places of ROW."""
        replaced = {key: learned[place] for key, place in self._places.items()}
        each = iter(rows)
        arguments = [
            next(each) if argument is ROW else _replaced(argument, replaced) for argument in self.arguments
        ]
        head, loss_fn = _replaced(self.head, replaced), _replaced(self.loss_fn, replaced)

        found = head(*hidden)
        return found, loss_fn(found, *arguments)

    def within(self, learned: tuple[Tensor, ...], run: Callable[[], Result]) -> Result:
        """run(), with these in the places of the modules' parameters. A backward pass belongs inside as well:
        a head that checkpoints runs once more in it."""
        swapped = {name: learned[place] for name, place in self._swapped.items()}
        found: Result = torch.func.functional_call(self._stage, swapped, (run,), tie_weights=False)
        return found

    def unseen(self, loss: Tensor, seen: Iterable[Tensor]) -> None:
        """Raise if the graph of `loss` ends in anything but the tensors that were `seen`."""
        known = {id(tensor) for tensor in seen}
        others = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        if not others:
            return
        names = _names(others, (self.loss_fn, self.head))
        listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        raise ArgumentError(
            f"loss_fn and head must not reach what needs a gradient through a closure or a global: {listed} "
            "would get none. Pass the nn.Module itself (or its bound method) as head or loss_fn; pass "
            "anything else to it by functools.partial, as in head=partial(logits, model.lm_head) or "
            "head=partial(F.linear, weight=weight); detach what needs no gradient"
        )

    def buffers(self) -> dict[str, tuple[int, int]]:
        """Something that is different after any buffer was changed."""
        return {
            f"{prefix}.{name}": (id(buffer), 0 if buffer.is_inference() else buffer._version)
            for prefix, module in self.modules.items()
            for name, buffer in module.named_buffers()
        }


ROW = object()
"""Among a call's arguments: here comes a chunk of the next tensor that is cut."""


class _Stage(nn.Module):
    """What torch.func.functional_call wants: one module that holds all the others."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        # Not an attribute: assigning would give the caller's modules to two parents, and scripts would mind.
        for k, module in enumerate(modules):
            self.add_module(str(k), module)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _brought(function: Any, name: str) -> Iterator[tuple[str, nn.Module | Tensor]]:
    if isinstance(function, (nn.Module, Tensor)):
        yield name, function
    elif isinstance(function, functools.partial):
        yield from _brought(function.func, name)
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            yield from _brought(value, f"{name}.{key}")
    elif inspect.ismethod(function):
        yield from _brought(function.__self__, name)


def _replaced(value: Any, replaced: dict[int, Tensor]) -> Any:
    if isinstance(value, functools.partial):
        arguments = (_replaced(each, replaced) for each in value.args)
        keywords = {key: _replaced(each, replaced) for key, each in value.keywords.items()}
        return functools.partial(_replaced(value.func, replaced), *arguments, **keywords)
    return replaced.get(id(value), value) if isinstance(value, Tensor) else value


def _leaves(loss: Tensor) -> list[Tensor]:
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    found, waiting, seen = [], [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):  # where gradients of a leaf are accumulated
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def _names(tensors: list[Tensor], functions: Iterable[Any]) -> list[str]:
    """As the functions' own code would write them, where that can be found out."""
    found: dict[int, str] = {}
    for function in functions:
        function = getattr(function, "func", function)
        function = inspect.unwrap(getattr(function, "__func__", function))
        if not inspect.isfunction(function):
            continue
        closure = inspect.getclosurevars(function)
        for name, value in {**closure.globals, **closure.nonlocals}.items():
            owners = {name: value} | {
                f"{name}.{key}": each for key, each in getattr(value, "__dict__", {}).items()
            }
            for owner, each in owners.items():
                if isinstance(each, Tensor):
                    found.setdefault(id(each), owner)
                elif isinstance(each, nn.Module):
                    for key, parameter in each.named_parameters():
                        found.setdefault(id(parameter), f"{owner}.{key}")
    return [found.get(id(tensor), f"a tensor of shape {list(tensor.shape)}") for tensor in tensors]
