"""Show deferred logits as a dataclass to torch.distributed, and to no other code.

DistributedDataParallel, FSDP1 and FSDP2 search a forward's outputs, dataclasses among them, for
tensors. The first looks for what the outputs depend on; the others attach their work before
backward to the tensors that they find, and may cast these. Other code that searches dataclasses
(dataclasses.asdict, Lightning's apply_to_collection) takes the logits for one object.
"""

import dataclasses
import sys
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lowtide.deferred.recorded import expression

SEARCHING = ("torch.distributed.", "torch.nn.parallel.")


class Whole:
    """Hold deferred logits among their own fields, where nobody searches them."""

    def __init__(self, logits: Any) -> None:
        self.logits = logits


@dataclasses.dataclass
class Parts:
    """Name the fields that deferred logits have as a dataclass."""

    leaves: list[Any]
    """The leaves of the pytree: functions of a leaf run on the logits."""
    operands: list[Tensor]
    """All other tensors that the logits depend on."""
    whole: Whole


class Fields:
    """Be the attribute that makes a dataclass of a class, in the eyes of torch.distributed."""

    def __get__(self, instance: object, owner: type) -> Any:
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__") == "dataclasses" and frame.f_back is not None:
            frame = frame.f_back
        if str(frame.f_globals.get("__name__")).startswith(SEARCHING):
            return Parts.__dataclass_fields__
        raise AttributeError("__dataclass_fields__")


class SearchedTensor(Tensor):
    """Represent a tensor that logits depend on. A cast of the logits does not cast it."""

    tensor: Tensor

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name == "is_floating_point":
            return False
        if name == "register_hook":
            return args[0].tensor.register_hook(*args[1:], **kwargs or {})
        if name == "__get__" and function.__self__.__name__ == "_base":
            return None  # FSDP2 warns of views, which could be changed in place.
        return super().__torch_function__(function, types, args, kwargs or {})


def leaves(logits: Any) -> list[Any]:
    return tree_flatten(logits)[0]


def operands(logits: Any) -> list[Tensor]:
    """Return what `leaves` does not lead to: all tensors but the first hidden states."""
    _, *others = expression.tensors(logits.node)
    return [] if logits.tensor is not None else [_operand(each) for each in others]


def _operand(tensor: Tensor) -> Tensor:
    if type(tensor) is not Tensor:
        return tensor
    operand = tensor.as_subclass(SearchedTensor)
    operand.tensor = tensor
    return operand


def join(leaves: list[Any], whole: Any) -> Any:
    """Return the logits, or a real tensor, of leaves that a function may have changed."""
    return tree_unflatten(leaves, tree_flatten(whole)[1])
