"""Tell in the forward of which autograd.Functions the code runs.

A Function gives no gradient to an argument that is not a tensor, as deferred logits are not.
"""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

APPLY = getattr(getattr(torch.autograd.Function.apply, "__func__", None), "__code__", None)


def in_function() -> bool:
    """Return True in the forward of an autograd.Function.

    torch switches forward-mode differentiation off there; torch.no_grad leaves it on.
    """
    if torch.compiler.is_compiling():
        return False
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())


def running_forwards() -> Iterator[FrameType]:
    """Yield a frame for each forward of an autograd.Function that runs, the innermost first.

    A frame is recognised by its context argument, or because it runs Function.apply. From torch
    2.14 on apply is not written in Python and has no frame, so a forward without a context is not
    found.
    """
    frame = sys._getframe(1) if in_function() else None
    found = False
    while frame is not None:
        if _context(frame) is not None:
            found = True
            yield frame
        elif frame.f_code is APPLY:
            if not found:
                yield frame
            found = False  # this apply belongs to the forward that was just found
        frame = frame.f_back


def is_running(forward: FrameType | None) -> bool:
    """Return True if the call of this frame has not ended."""
    frame = None if forward is None else sys._getframe(1)
    while frame is not None and frame is not forward:
        frame = frame.f_back
    return frame is not None


def describe_function(forward: FrameType | None) -> tuple[str, bool]:
    """Return a description of the frame's Function, and whether its inputs need gradients.

    Without a context neither is known: the description is general, and the inputs count as needing
    gradients.
    """
    context = None if forward is None else _context(forward)
    if context is None:
        return described(None), True
    return described(context._forward_cls), any(context.needs_input_grad)


def described(function: type | None) -> str:
    return f"{function.__name__}, an autograd.Function" if function else "an autograd.Function"


def refusal(function: str) -> str:
    """Return the message for a Function, as described, that was given deferred logits."""
    return (
        f"{function}, was given deferred logits, and would lose their gradient; pass logits.materialize(), "
        "or undo() the deferral"
    )


def _context(frame: FrameType) -> Any:
    """Return the context that a Function's forward has as its first argument, or None."""
    first: Any = frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))
    return None if getattr(type(first), "_forward_cls", None) is None else first
