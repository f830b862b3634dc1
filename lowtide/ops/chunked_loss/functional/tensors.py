"""Find the tensors that the caller's two functions bring along, and replace them by copies.

Autograd has to know every tensor that a loss depends on. An nn.Module brings its parameters, a
bound method those of its module, a functools.partial its arguments. While a chunk runs, these
tensors are replaced by detached copies that share their memory, class and attributes. So hooks of
the originals do not see the gradients of single chunks. Tensors in a closure cannot be replaced
(leaves.py).
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from lowtide.core.errors import ArgumentTypeError
from lowtide.ops.chunked_loss.functional.fsdp import forward_of

Function = Callable[..., Any]
Result = TypeVar("Result")

ROW = object()
"""Stands in a call's arguments for a token tensor, of which each chunk gets its rows."""


class Functional:
    """Represent loss_fn(head(*hidden), *arguments) as a function of all tensors that it depends on.

    Attributes:
        modules: the modules that the functions and arguments bring along, by name.
        tensors: the tensors that they bring along outside of modules, by name.
        learned: the tensors that require a gradient, each once, including parameters of the
            modules. With `every`, all floating-point tensors.
        names: the name of each learned tensor.
        parts: the modules and the modules inside them, by name.
    """

    def __init__(
        self, loss_fn: Function, head: Function, arguments: tuple[Any, ...], *, every: bool = False
    ) -> None:
        self.loss_fn, self.head, self.arguments = loss_fn, forward_of(head), arguments
        owned = [*find_owned(head, "head"), *find_owned(loss_fn, "loss_fn")]
        for k, argument in enumerate(arguments):
            owned += find_owned(argument, f"token_tensors[{k}]")
        self.modules = {name: each for name, each in owned if isinstance(each, nn.Module)}
        self.tensors = {name: each for name, each in owned if isinstance(each, Tensor)}
        named = [(name, each) for name, each in owned if isinstance(each, Tensor)]
        for prefix, module in self.modules.items():
            parameters = module.named_parameters(remove_duplicate=False)
            named += [(f"{prefix}.{name}", parameter) for name, parameter in parameters]
        learned: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in named:
            if tensor.is_floating_point() if every else tensor.requires_grad:
                learned.setdefault(id(tensor), (name, tensor))
        self.names = [name for name, _ in learned.values()]
        self.learned = tuple(tensor for _, tensor in learned.values())
        self._places = {key: place for place, key in enumerate(learned)}
        self.parts = [
            part for prefix, module in self.modules.items() for part in module.named_modules(prefix=prefix)
        ]
        # A module may have several names, but its parameters are replaced once. A second
        # replacement would take the first one's copies for the originals, and leave them there.
        self._parameters = [
            (part._parameters, name, self._places[id(parameter)])
            for part in {id(part): part for _, part in self.parts}.values()
            for name, parameter in part._parameters.items()
            if id(parameter) in learned
        ]

    def __call__(self, hidden: Sequence[Tensor], rows: Iterable[Tensor], learned: tuple[Tensor, ...]) -> Any:
        """Return the results of head and loss_fn; call this only within `substituted`.

        `rows` are the chunks of the token tensors, and `learned` replace the learned tensors.
        """
        new = {key: learned[place] for key, place in self._places.items()}
        row = iter(rows)
        arguments = [next(row) if each is ROW else _replaced(each, new) for each in self.arguments]
        head, loss_fn = _replaced(self.head, new), _replaced(self.loss_fn, new)
        try:
            out = head(*hidden)
        except RuntimeError as error:
            _refuse_integers(hidden, error)
            raise
        return out, loss_fn(out, *arguments)

    def substituted(self, learned: tuple[Tensor, ...], run: Callable[[], Result]) -> Result:
        """Return run(), with `learned` in place of the modules' parameters.

        `run` must include the backward pass, in which a head with checkpoints runs once more.
        """
        for own, original in zip(learned, self.learned):
            if own.__dict__ is not original.__dict__:  # as in the pass's first chunk
                _pass_off(own, original)
        # torch.func.functional_call does the same, but takes 30 times as long, for each chunk.
        originals = [parameters[name] for parameters, name, _ in self._parameters]
        try:
            for parameters, name, place in self._parameters:
                parameters[name] = learned[place]
            return run()
        finally:
            for (parameters, name, _), original in zip(self._parameters, originals):
                parameters[name] = original


def _refuse_integers(hidden: Sequence[Tensor], error: RuntimeError) -> None:
    """Raise if all of hidden is integers, since the error of head most likely comes from that.

    A head that looks them up in a table takes integers. So this is checked only after an error.
    """
    if type(error) in (RuntimeError, NotImplementedError) and not any(
        each.is_floating_point() or each.is_complex() for each in hidden
    ):
        raise ArgumentTypeError(
            f"hidden must be floating-point unless head looks it up in a table, got {hidden[0].dtype}, for "
            f"which head raises: {error}; labels come after hidden"
        ) from error


def find_owned(function: Any, name: str) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """Yield the modules and tensors that a function or an argument brings along, with names."""
    if isinstance(function, (nn.Module, Tensor)):
        yield name, function
    elif isinstance(function, functools.partial):
        yield from find_owned(function.func, name)
        for key, value in (*enumerate(function.args), *function.keywords.items()):
            yield from find_owned(value, f"{name}.{key}")
    elif _is_container(function):
        for key, value in function.items() if isinstance(function, dict) else enumerate(function):
            yield from find_owned(value, f"{name}.{key}")
    elif inspect.ismethod(function):
        yield from find_owned(function.__self__, name)


def is_plain(tensor: Tensor) -> bool:
    """Return True for a tensor of a class that computes as torch.Tensor and nn.Parameter do."""
    kind: Any = type(tensor)
    return _is_plain(kind)


@functools.lru_cache(maxsize=64)
def _is_plain(kind: Any) -> bool:
    own = kind is not Tensor and kind.__torch_function__ is not nn.Parameter.__torch_function__
    return not own and kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def _pass_off(own: Tensor, original: Tensor) -> None:
    """Give a copy the class and the attributes of its original, for code that asks for them.

    Code asks whether a tensor is an nn.Parameter, and muP asks each parameter for its `infshape`.
    """
    if type(own) is Tensor and is_plain(original):
        own.__class__ = type(original)
        own.__dict__ = original.__dict__  # what the code writes there is seen on the original
    elif own is not original:
        vars(own).update({key: each for key, each in vars(original).items() if key not in vars(own)})


def _is_container(value: Any) -> bool:
    """Return True for dictionaries (OrderedDict, outputs of Transformers), lists and tuples."""
    named = isinstance(value, tuple) and hasattr(value, "_fields")
    return isinstance(value, (dict, list)) or type(value) is tuple or named


def _replaced(value: Any, new: dict[int, Tensor]) -> Any:
    """Return a value with its tensors replaced by `new`, also inside partials and containers.

    A value without such tensors is returned itself: the functions may write to it (a log).
    """
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if isinstance(value, functools.partial):
        function, arguments = _replaced(value.func, new), _replaced(value.args, new)
        keywords = _replaced(value.keywords, new)
        same = function is value.func and arguments is value.args and keywords is value.keywords
        return value if same else functools.partial(function, *arguments, **keywords)
    if not _is_container(value):
        return value
    keys = list(value) if isinstance(value, dict) else range(len(value))
    changed = {key: own for key in keys if (own := _replaced(value[key], new)) is not value[key]}
    if not changed:
        return value
    if isinstance(value, tuple):
        parts = [changed.get(key, each) for key, each in enumerate(value)]
        return type(value)._make(parts) if hasattr(value, "_fields") else tuple(parts)  # type: ignore[attr-defined]
    copied = copy.copy(value)
    for key, each in changed.items():
        copied[key] = each
    return copied
