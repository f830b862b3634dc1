"""Define what all logits of one call of the head share."""

from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from lowtide.core import torch_private
from lowtide.deferred.proxies.autograd_functions import (
    describe_function,
    in_function,
    is_running,
    running_forwards,
)
from lowtide.deferred.proxies.counts import Counts
from lowtide.deferred.recorded.expression import Node
from lowtide.deferred.recorded.match_head import LinearHead
from lowtide.ops.linear_cross_entropy import LogProbs


class HeadPass(NamedTuple):
    """Hold the results of a pass over the classes of a head, for operations that need others."""

    node: Node
    head: LinearHead
    grad: bool
    """True if gradients were on."""
    results: LogProbs
    """No code outside has them: it may change its own, hook or differentiate by them."""

    def serves(self, node: Node, head: LinearHead, grad: bool) -> bool:
        """Return whether a pass over the node's head now would give the same results.

        Whoever matched the node has checked that its tensors have not changed since its call. A
        node may be a head of new tensors each time (the scaled inputs of an adapter).
        """
        return self.grad == grad and (self.node is node or self.head.is_same(head))


class HeadCall:
    """Hold what all logits of one call of the head share."""

    def __init__(self, counts: Counts, workspace: int | None, classes: int) -> None:
        self.counts = counts
        self.workspace = workspace
        """Bytes that each fused loss may hold; None for the default."""
        self.classes = classes
        """The number of outputs of the product that makes the logits."""
        self.grad = torch.is_grad_enabled()
        """True if gradients were on where the head was called."""
        self.last_pass: HeadPass | None = None
        """The last pass of the fused operator over the logits' classes."""
        self.picked = False
        """True once values of the logits have been picked from chunks (topk, max, ...)."""
        self.accounted = False
        """True once logits have been deferred, or counted as real."""
        self.mesh: Any = None
        """The mesh over which tensor parallelism divides the classes; None without."""
        self.placements: tuple[Any, ...] = ()
        """The placements that a DTensor of these logits would have."""
        self.checkpoint = running_checkpoint()
        """Tells the checkpoint around the call from others; None without one."""
        forwards: list[FrameType | None] = list(running_forwards()) or [None]
        self.forward = forwards[0]
        """The frame of the innermost autograd.Function's forward around the call, if any."""
        self.function: str | None = None
        """The name of the innermost Function around the call that has an input to differentiate."""
        self.left = self.forward
        """The frame of that Function's forward."""
        if in_function() and not torch.is_grad_enabled():
            # The inputs of a Function inside another need no gradients; then the outer one counts.
            for forward in forwards:
                function, needs_grad = describe_function(forward)
                if needs_grad:
                    self.function, self.left = function, forward
                    break

    @property
    def in_other_checkpoint(self) -> bool:
        """Return True within a checkpoint that the call of the head was not in.

        Its two runs must save the same tensors, and the logits may be materialised between the two.
        So they are materialised anew there.
        """
        checkpoint = running_checkpoint()
        return checkpoint is not None and checkpoint is not self.checkpoint

    def check_left(self) -> None:
        """Raise an error if the logits have left a Function, which gave them no gradient."""
        if self.function is not None and torch.is_grad_enabled() and not is_running(self.left):
            raise RuntimeError(
                f"these logits have left {self.function}, without their gradient; compute the loss in "
                "it, or undo() the deferral (of torch.utils.checkpoint take the other kind, "
                "use_reentrant=False)"
            )


def running_checkpoint() -> Any:
    """Return the hook of the innermost checkpoint that is not reentrant, in either of its runs."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch_private.top_saved_tensors_hooks(True)
    module = None if hooks is None else getattr(hooks[0], "__module__", None)
    return hooks[0] if module == torch.utils.checkpoint.__name__ else None
