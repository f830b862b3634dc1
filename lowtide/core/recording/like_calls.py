"""Call an operator as in earlier calls that are alike, by a recording of what it did."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from lowtide.core.recording.recorded import Recordings
from lowtide.core.strides import layouts_of

_recordings: dict[Callable[..., Any], Recordings] = {}


def call_alike(
    function: Callable[..., Any], tensors: Sequence[Tensor | None], constants: Sequence[Hashable]
) -> Sequence[Tensor | None]:
    """Return function(*tensors, *constants), computed on the current device, where the tensors are.

    The function depends on nothing but the constants and how the tensors lie, and changes no
    tensor.
    """

    def with_constants(*each: Tensor | None) -> Any:
        return function(*each, *constants)

    own = _recordings.setdefault(function, Recordings())
    return own.call(with_constants, ((*constants,), layouts_of(tensors)), tensors)
