"""Define what all logits of one call of the head share, and what those of one memory share."""

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor

from lowtide.core import torch_private
from lowtide.deferred.proxies.autograd_functions import describe_function, in_function, running_forwards
from lowtide.deferred.proxies.counts import Counts


class View(NamedTuple):
    """Hold the call of a tensor's method that returns a view."""

    name: str
    arguments: tuple[Any, ...]
    grad: bool
    """True if gradients were on; torch refuses some changes of views that were made without."""

    def of(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.set_grad_enabled(self.grad):
            view: Tensor = getattr(tensor, self.name)(*self.arguments)
            return view


class Storage:
    """Hold what all logits share that would be views of the same memory as real tensors."""

    def __init__(self, node: Any, meta: Tensor, head_call: "HeadCall", class_dim: int) -> None:
        self.whole = (node, meta, head_call, class_dim)
        """Defines the whole logits, which the others are views of."""
        self.made = 0
        """Counts those of these logits that have been materialised, each by itself."""
        self.changed: str | None = None
        """The operation that changed materialised logits in place, if any."""
        self.tensor: Tensor | None = None
        """The whole logits, once a change of them or of a view has been recorded."""
        self.before: Storage | None = None
        """That of the same logits before an autograd.Function returned them, if one has."""
        self.traced = False
        """True if torch.compile traced any of these logits, which `living` does not have."""
        self.living: weakref.WeakValueDictionary[int, Any] | None = None
        """Those of these logits that code can still use; None if the head was traced."""
        if not torch.compiler.is_compiling():
            self.living = weakref.WeakValueDictionary()

    def add(self, logits: Any) -> None:
        if torch.compiler.is_compiling():
            self.traced = True
        elif self.living is not None:
            self.living[id(logits)] = logits

    def notice(self) -> None:
        """Record a change that real logits took as a tensor, without a call of these logits."""
        if self.changed is not None or self.made == 0 or torch.compiler.is_compiling():
            return
        for each in () if self.living is None else list(self.living.values()):
            if each.version is not None and each.version != each.made._version:
                self.changed = "a method of the real logits, or of a view of them"
                if each.path == ():
                    self.tensor = each.made


class HeadCall:
    """Hold what all logits of one call of the head share."""

    def __init__(self, counts: Counts, workspace: int | None, by_chunks: Callable[..., Any]) -> None:
        self.counts = counts
        self.workspace = workspace
        """Bytes that each fused loss may hold; None for the default."""
        self.by_chunks = by_chunks
        """`chunks.evaluate`: it makes real logits by the products that picked values come from."""
        self.chunk_sizes: dict[Any, int] = {}
        """Those that values have been picked from (topk, max, ...), as `chunks.by_rows` says."""
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


def running_checkpoint() -> Any:
    """Return the hook of the innermost checkpoint that is not reentrant, in either of its runs."""
    if torch.compiler.is_compiling():
        return None
    hooks = torch_private.top_saved_tensors_hooks(True)
    module = None if hooks is None else getattr(hooks[0], "__module__", None)
    return hooks[0] if module == torch.utils.checkpoint.__name__ else None
