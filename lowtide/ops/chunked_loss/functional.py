"""Turn the caller's two functions into a function of tensors alone.

Autograd has to know every tensor that a loss depends on. The tensors of an nn.Module are its
parameters, those of a bound method its module's, those of a functools.partial its arguments. They
are found, and replaced while a chunk runs by detached copies that share their memory, so that none
of their hooks sees a chunk's gradient. What a closure brings along cannot be replaced: `unseen`
finds in the graph what needs a gradient and raises. Constants are compared before a chunk is
computed again (constants.py).
"""

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lowtide.core.errors import ArgumentError
from lowtide.ops.chunked_loss.constants import constants

Function = Callable[..., Any]
Result = TypeVar("Result")


class Call:
    """Hold loss_fn(head(*hidden), *arguments), and the tensors that it reaches."""

    def __init__(
        self, loss_fn: Function, head: Function, arguments: tuple[Any, ...], every: bool = False
    ) -> None:
        self.loss_fn, self.head, self.arguments = loss_fn, forward_of(head), arguments
        brought = [*_brought(head, "head"), *_brought(loss_fn, "loss_fn")]
        for k, argument in enumerate(arguments):
            brought += _brought(argument, f"token_tensors[{k}]")
        self.modules = {name: each for name, each in brought if isinstance(each, nn.Module)}
        self._brought = {name: each for name, each in brought if isinstance(each, Tensor)}
        tensors = [(name, each) for name, each in brought if isinstance(each, Tensor)]
        for prefix, module in self.modules.items():
            parameters = module.named_parameters(remove_duplicate=False)
            tensors += [(f"{prefix}.{name}", parameter) for name, parameter in parameters]
        places: dict[int, int] = {}
        learned: list[Tensor] = []
        self.names: list[str] = []
        for name, tensor in tensors:
            taken = tensor.is_floating_point() if every else tensor.requires_grad
            if taken and id(tensor) not in places:
                places[id(tensor)] = len(learned)
                learned.append(tensor)
                self.names.append(name)
        self.learned = tuple(learned)
        """The tensors that need a gradient (with `every`, those that may have one), each once."""
        self._places = places
        self._stage = _Stage(self.modules.values())
        self._swapped = {
            name: places[id(parameter)]
            for name, parameter in self._stage.named_parameters(remove_duplicate=False)
            if id(parameter) in places
        }

    def __call__(self, hidden: Iterable[Tensor], rows: Iterable[Tensor], learned: tuple[Tensor, ...]) -> Any:
        """Return what head returned and what loss_fn returned; to be called within `within`.

        `rows` take the places of ROW.
        """
        replaced = {key: learned[place] for key, place in self._places.items()}
        each = iter(rows)
        arguments = [
            next(each) if argument is ROW else _replaced(argument, replaced) for argument in self.arguments
        ]
        head, loss_fn = _replaced(self.head, replaced), _replaced(self.loss_fn, replaced)

        found = head(*hidden)
        return found, loss_fn(found, *arguments)

    def within(self, learned: tuple[Tensor, ...], run: Callable[[], Result]) -> Result:
        """Return run(), with these tensors in place of the modules' parameters.

        A backward pass belongs inside as well: a head with checkpoints runs once more in it.
        """
        swapped = {name: learned[place] for name, place in self._swapped.items()}
        found: Result = torch.func.functional_call(self._stage, swapped, (run,), tie_weights=False)
        return found

    def unseen(self, loss: Tensor, seen: Iterable[Tensor]) -> None:
        """Raise if the graph of `loss` has leaves other than the tensors that were `seen`."""
        known = {id(tensor) for tensor in seen}
        others = [leaf for leaf in _leaves(loss) if id(leaf) not in known]
        if not others:
            return
        names = {id(tensor): name for name, tensor in self._reached()}
        raise closure_error([names.get(id(leaf), f"a tensor of shape {list(leaf.shape)}") for leaf in others])

    def reached(self, wrongly: Callable[[Tensor], bool]) -> list[str]:
        """Return the names of tensors that the functions' own code should not reach.

        Only what its closures and globals show is found.
        """
        return list({id(tensor): name for name, tensor in self._reached() if wrongly(tensor)}.values())

    def _reached(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the functions' own code reaches, named as in the code."""
        for function in (self.head, self.loss_fn):
            function = getattr(function, "func", function)
            function = inspect.unwrap(getattr(function, "__func__", function))
            if not inspect.isfunction(function):
                continue
            closure = inspect.getclosurevars(function)
            for name, value in {**closure.globals, **closure.nonlocals}.items():
                owners = {f"{name}.{key}": each for key, each in getattr(value, "__dict__", {}).items()}
                for owner, each in (owners | {name: value}).items():
                    if isinstance(each, Tensor):
                        yield owner, each
                    elif isinstance(each, nn.Module):
                        for key, parameter in each.named_parameters():
                            yield f"{owner}.{key}", parameter

    def buffers(self) -> dict[str, tuple[int, int]]:
        """Return a value that differs after any buffer has changed."""
        return {
            f"{prefix}.{name}": _version(buffer)
            for prefix, module in self.modules.items()
            for name, buffer in module.named_buffers()
        }

    def state(self) -> dict[str, tuple[int, int]]:
        """Return a value that differs once a chunk would be computed differently.

        It covers tensors, modules' parameters and buffers, and training modes.
        """
        found = {name: _version(tensor) for name, tensor in self._brought.items()} | self.buffers()
        for prefix, module in self.modules.items():
            found |= {f"{prefix}.{name}": _version(each) for name, each in module.named_parameters()}
            for name, each in module.named_modules():
                found[f"{prefix}.{name}".rstrip(".") + ".training"] = 0, int(each.training)
        # These are put into their places by name, whatever the modules hold by then.
        return found | {name: _version(tensor) for name, tensor in zip(self.names, self.learned)}

    def constants(self) -> dict[str, Any]:
        """Return a value that differs once a constant of the code does (constants.py).

        Constants are in closures, in globals and on modules.
        """
        known = {id(tensor) for tensor in (*self.learned, *self._brought.values())}
        for module in self.modules.values():
            known |= {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        arguments = {f"token_tensors[{k}]": each for k, each in enumerate(self.arguments) if each is not ROW}
        return constants({"head": self.head, "loss_fn": self.loss_fn, **arguments}, known)


def _version(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's id and version."""
    return id(tensor), 0 if tensor.is_inference() else tensor._version


def closure_error(names: Sequence[str]) -> ArgumentError:
    """Return the error for tensors that need a gradient and are reached through a closure."""
    listed = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return ArgumentError(
        f"loss_fn and head must not reach what needs a gradient through a closure or a global: {listed} "
        "would get none. Pass the nn.Module itself (or its bound method) as head or loss_fn; pass "
        "anything else to it by functools.partial, as in head=partial(logits, model.lm_head) or "
        "head=partial(F.linear, weight=weight); detach what needs no gradient"
    )


_lock = threading.Lock()
_threads: dict[int, list[int]] = {}  # module -> the threads that run chunks with it


@contextlib.contextmanager
def alone(functions: Iterable[Any]) -> Iterator[None]:
    """Keep other threads from running chunks with any module of these functions.

    Another thread would find, and leave behind, the copies that replace the parameters. A backward
    pass may run in threads of its own and is let in.
    """
    brought = [each for function in functions for _, each in _brought(function, "")]
    modules = {id(part) for each in brought if isinstance(each, nn.Module) for part in each.modules()}
    own = threading.get_ident()
    with _lock:
        others = {thread for module in modules for thread in _threads.get(module, ())} - {own}
        if others and torch._C._current_graph_task_id() == -1:
            raise ArgumentError(
                "another thread is running chunked_loss with the same module, whose parameters are replaced "
                "meanwhile: one at a time (a lock), or a module for each thread (copy.deepcopy)"
            )
        for module in modules:
            _threads.setdefault(module, []).append(own)
    try:
        yield
    finally:
        with _lock:
            for module in modules:
                _threads[module].remove(own)
                if not _threads[module]:
                    del _threads[module]


ROW = object()
"""Stands among a call's arguments for a chunk of the next tensor that is cut."""


class _Stage(nn.Module):
    """Hold all modules in one, which torch.func.functional_call asks for."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        # Not an attribute: that would give the caller's modules to two parents, and scripts would
        # mind.
        for k, module in enumerate(modules):
            self.add_module(str(k), module)

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


def _brought(function: Any, name: str) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield the modules and tensors that a function brings along, with their names."""
    if isinstance(function, (nn.Module, Tensor)):
        yield name, function
    elif isinstance(function, functools.partial):
        yield from _brought(function.func, name)
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            yield from _brought(value, f"{name}.{key}")
    elif type(function) in (dict, list, tuple):
        for key, value in function.items() if isinstance(function, dict) else enumerate(function):
            yield from _brought(value, f"{name}.{key}")
    elif inspect.ismethod(function):
        yield from _brought(function.__self__, name)


def _replaced(value: Any, replaced: dict[int, Tensor]) -> Any:
    """Return a value with its tensors replaced, also inside partials and containers."""
    if isinstance(value, functools.partial):
        arguments = (_replaced(each, replaced) for each in value.args)
        keywords = {key: _replaced(each, replaced) for key, each in value.keywords.items()}
        return functools.partial(_replaced(value.func, replaced), *arguments, **keywords)
    if type(value) is dict:
        return {key: _replaced(each, replaced) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(each, replaced) for each in value)
    return replaced.get(id(value), value) if isinstance(value, Tensor) else value


def _leaves(loss: Tensor) -> list[Tensor]:
    """Return the leaves of a loss's graph."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    found, waiting, seen = [], [loss.grad_fn], {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):  # the node that accumulates a leaf's gradient
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


# FSDP2 gathers the parameters of a unit (a module after fully_shard) in hooks around its forward.
# Here the loop over the chunks runs as one forward method of the unit. Inside, the loop calls the
# unit's plain `forward`, which has no hooks around it.

METHOD = "_lowtide_chunks"


def gathered(head: Any, hidden: tuple[Tensor, ...], run: Callable[[tuple[Tensor, ...]], Any]) -> Any:
    """Return run(hidden), with head's parameters gathered around it if they are sharded."""
    unit = getattr(head, "__self__", head)
    _check_head(head)
    if not _is_unit(unit):
        return run(hidden)
    from torch.distributed.fsdp import register_fsdp_forward_method

    # By default torch frees the parameters after forward for all units but the root, which backward
    # would need at once. A head's are needed at once too, and would be gathered twice (decision
    # 0011).
    if unit._get_fsdp_state()._auto_reshard_after_forward:
        unit.set_reshard_after_forward(False, recurse=False)
    # The hooks cast the tensors among the method's arguments, and look at them and at its result.
    setattr(unit, METHOD, lambda *hidden: run(hidden))
    try:
        register_fsdp_forward_method(unit, METHOD)
        return getattr(unit, METHOD)(*hidden)
    finally:
        delattr(unit, METHOD)


def check_units(modules: Mapping[str, nn.Module], head: Any) -> None:
    """Raise for units that `gathered` does not know: each chunk would gather and reduce them."""
    for name, module in modules.items():
        if _is_unit(module) and module is not getattr(head, "__self__", head):
            raise ArgumentError(
                f"{name} is an FSDP unit, which only head may be, itself or by a bound method; make it part "
                "of head, or make one unit of the module whose forward calls chunked_loss"
            )


def forward_of(head: Any) -> Any:
    """Return `head` as it is called for each chunk."""
    if not _is_unit(head):
        return head
    if len(head._forward_hooks) + len(head._forward_pre_hooks) > 2:
        raise ArgumentError(
            "head is an FSDP unit with forward hooks of its own; they would be skipped: register them on a "
            "module inside it, or make a unit of the module whose forward calls chunked_loss"
        )
    return head.forward


def _check_head(head: Any) -> None:
    """Raise for a head that DDP wraps, or that has FSDP units inside."""
    if isinstance(head, DistributedDataParallel):
        raise ArgumentError(
            "head must not be a DistributedDataParallel, whose forward is once a step: pass "
            "head.module, and wrap the model that it belongs to"
        )
    if not isinstance(head, nn.Module):
        return
    inner = [key for key, module in head.named_modules() if module is not head and _is_unit(module)]
    if inner:
        raise ArgumentError(
            f"head must be one FSDP unit, but has others inside: {', '.join(inner)}. They would be "
            "gathered for each chunk; fully_shard head as a whole"
        )


def _is_unit(module: Any) -> bool:
    """Return True for an FSDP2 unit."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a unit exists only if this is imported
    return fsdp is not None and isinstance(module, getattr(fsdp, "FSDPModule", ()))
