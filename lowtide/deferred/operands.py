"""Keep tensors as they were when they were recorded.

`Recorded.value` is the only way from a record to a tensor, and refuses one that has changed since.
Small operands (a number, a number a class) are copied instead, so that they may change.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.core.autodiff import active


class Recorded(NamedTuple):
    """Hold hidden states or a weight, shared with the model."""

    tensor: Tensor
    version: int | None
    """The version counter; None while torch.compile traces, where there is none."""

    def value(self) -> Tensor:
        """Return the tensor; raise an error if it has since been changed or freed."""
        if _freed(self.tensor):
            raise RuntimeError(
                "the head's weight has been freed since the head was called: it is sharded, and gathered "
                "only within the head's own forward. With FSDP2 keep it until backward, by "
                "fully_shard(head, reshard_after_forward=False) or head.set_reshard_after_forward(False), or "
                "shard the head with its parent; else undo() the deferral"
            )
        if self.version is not None and self.version != _version(self.tensor):
            raise RuntimeError(
                "these logits are computed only when they are needed, and the hidden states or the head's "
                "weight have been changed in place since the head was called (by optimizer.step()?); use the "
                "logits before that, or keep what you need of them (such as logits.argmax(-1))"
            )
        return self.tensor


def record(tensor: Tensor) -> Recorded:
    """Record a tensor whose data no other code can replace."""
    return Recorded(tensor, _version(tensor))


def record_shared(tensor: Tensor) -> Recorded:
    """Record a model's tensor by an alias, which keeps its memory if `tensor.data` is replaced."""
    if torch.compiler.is_compiling():
        return record(tensor)
    if active(tensor):  # An alias would lose the tangent, and the level.
        return record(tensor)
    if tensor.is_inference():  # Without a version counter a change would go unnoticed.
        return record(tensor.clone())
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    return record(_Alias.apply(tensor) if tracked else tensor.detach())


def copied(tensor: Tensor) -> Tensor:
    """Copy a small operand, differentiably."""
    return tensor.clone()


def _version(tensor: Tensor) -> int | None:
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _freed(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


class _Alias(torch.autograd.Function):
    """Give a tensor a node of its own in the graph, as an output of the head has one.

    FSDP2 attaches hooks to it, and DDP follows it to the weight.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent
