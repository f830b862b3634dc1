"""Find out who is calling from the interpreter's frames, where no other interface tells."""

import sys
from collections.abc import Iterator
from types import CodeType, FrameType

import torch
from torch.autograd import Function

APPLY: CodeType = Function.apply.__func__.__code__  # type: ignore[attr-defined]


def enclosing_function() -> FrameType | None:
    """Return the frame of the autograd.Function whose forward is running, or None.

    Nothing has a gradient in such a forward.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return None
    inner = None
    for frame in _callers():
        if frame.f_code is APPLY and _is_differentiated(inner):
            return frame
        inner = frame
    return None


def _is_differentiated(forward: FrameType | None) -> bool:
    """Return whether the results of an autograd.Function's forward may need gradients.

    Return True if the forward has no context to ask.
    """
    names = () if forward is None else forward.f_code.co_varnames[:1]
    contexts = [forward.f_locals.get(name) for name in names if forward is not None]
    return all(any(getattr(each, "needs_input_grad", None) or (True,)) for each in contexts)


def is_at_work(frame: FrameType) -> bool:
    """Return whether the call of this frame has not ended."""
    return any(each is frame for each in _callers())


def functions_of_arguments() -> Iterator[tuple[type, tuple[object, ...]]]:
    """Yield each autograd.Function whose forward is running, and its arguments."""
    for frame in _callers():
        if frame.f_code is APPLY:
            yield frame.f_locals["cls"], frame.f_locals.get("args", ())


def user_stacklevel() -> int:
    """Return the stacklevel that names the nearest caller outside lowtide and torch."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in ("lowtide", "torch"):
        level, frame = level + 1, frame.f_back
    return level


def _callers() -> Iterator[FrameType]:
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back
