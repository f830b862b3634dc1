"""Walk over the graph of a loss."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def nodes(loss: Tensor) -> Iterator[Any]:
    """Yield once each node that a backward pass from `loss` may reach."""
    if loss.grad_fn is None:
        return
    waiting: list[Any] = [loss.grad_fn]
    seen = {loss.grad_fn}
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def is_leaf(node: Any) -> bool:
    """Return True for a node that accumulates the gradient of a leaf, its `variable`."""
    return hasattr(node, "variable")
