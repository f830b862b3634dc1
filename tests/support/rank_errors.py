"""What scenarios of several ranks (ranks.py) are told of mistakes. On CUDA those that depend on the
values of tensors give NaN, as to look at them would be to wait for the card.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.ranks import DEVICE

NOTHING = "nothing was raised"


def raised(call: Callable[[], Any]) -> str:
    """The message of an error."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return NOTHING


def raised_by_values(call: Callable[[], torch.Tensor], later: Callable[[], Any]) -> str:
    """The message of a loss for tensors whose values differ between ranks, but not their sizes.

    On CUDA to look at them would be to wait: the loss is NaN, and one of the next calls raises.
    """
    losses: list[torch.Tensor] = []
    message = raised(lambda: losses.append(call()))
    if DEVICE == "cpu" or message != NOTHING:
        return message
    assert losses[0].isnan().all(), "the loss is a number, though the ranks' tensors differ"
    return raised_later(later)


def raised_later(later: Callable[[], Any]) -> str:
    """The message of the first of a few calls that raises."""
    messages = (raised(later) for _ in range(3))
    return next((each for each in messages if each != NOTHING), NOTHING)


def raised_in_backward(
    backward: Callable[[], Any], leaves: Sequence[Any], later: Callable[[], Any] | None = None
) -> str:
    """The message of a backward whose upstream gradient, or call, differs between ranks.

    On CUDA to look at the gradient would be to wait: all gradients are NaN, and a later call
    raises.
    """
    message = raised(backward)
    if DEVICE == "cpu" or message != NOTHING:
        return message
    for leaf in leaves:
        gradient = getattr(leaf.grad, "to_local", lambda leaf=leaf: leaf.grad)()
        assert gradient.isnan().any(), "a gradient is a number, though the ranks' backward differ"
    assert later is not None, NOTHING
    return raised_later(later)
