"""Call an operator as in earlier calls that are alike, by a recording of what it did."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lowtide.core.recording.recorded import RecordedFunction

MOST = 64  # the most functions; at this number all are dropped

_functions: dict[Hashable, RecordedFunction] = {}


def call_alike(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], constants: Sequence[Hashable]
) -> Sequence[Tensor | None]:
    """Return function(*tensors, *constants), computed on the current device, where the tensors are.

    It depends on nothing but the constants and how the tensors lie, and changes no tensor.
    """
    key = function, *constants
    recorded = _functions.get(key)
    if recorded is None:
        if len(_functions) >= MOST:
            _functions.clear()
        recorded = _functions[key] = RecordedFunction(partial(_with_constants, function, constants))
    layouts = tuple([None if each is None else _layout_of(each) for each in tensors])
    return recorded(layouts, *tensors)


def _with_constants(
    function: Callable[..., Any], constants: Sequence[Hashable], *tensors: Tensor | None
) -> Any:
    return function(*tensors, *constants)


def _layout_of(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
