"""What makes logits: a small tree of products and of elementwise operations on them, as the model's code
spelled them. Run on all rows it gives the logits to the bit; it can as well be run on some of the rows, or on
some of the classes, as no operation in it mixes rows.

Shapes: [...] are the rows, D features, V classes.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

Node = Union["Linear", "Apply"]

FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "clone": torch.clone,
    "detach": torch.detach,
    "div": torch.div,
    "exp": torch.exp,
    "log_softmax": torch.log_softmax,
    "mul": torch.mul,
    "neg": torch.neg,
    "softmax": torch.softmax,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "to": torch.Tensor.to,
}
MIX_CLASSES = ("log_softmax", "softmax")


class Linear(NamedTuple):
    """One product, as F.linear would have made it where the head was called."""

    input: Tensor  # [..., D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    autocast: torch.dtype | None
    """Autocast's dtype there, None where it was off."""
    versions: tuple[int, ...]


class Vector(NamedTuple):
    """An operand with a number for each class."""

    tensor: Tensor  # [V]


class Apply(NamedTuple):
    """FUNCTIONS[name](*operands): nodes, vectors, and what suits any row and class (numbers, dtypes)."""

    name: str
    operands: tuple[object, ...]
    autocast: torch.dtype | None


def linear(input: Tensor, weight: Tensor, bias: Tensor | None, autocast: torch.dtype | None) -> Linear:
    return Linear(input, weight, bias, autocast, _versions(input, weight, bias))


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def run(node: Node) -> Tensor:
    """The logits of the rows and classes that the tree has."""
    with as_recorded(first(node).input.device, node.autocast):
        if isinstance(node, Linear):
            return F.linear(node.input, node.weight, node.bias)
        return FUNCTIONS[node.name](*(_operand(each) for each in node.operands))


def as_recorded(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast as it was: the loss is often computed elsewhere."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def first(node: Node) -> Linear:
    return next(linears(node))


def linears(node: Node) -> Iterator[Linear]:
    if isinstance(node, Linear):
        yield node
    else:
        for each in node.operands:
            if isinstance(each, (Linear, Apply)):
                yield from linears(each)


def tensors(node: Node) -> Iterator[Tensor]:
    for each in linears(node):
        yield from (tensor for tensor in each[:3] if tensor is not None)


def requires_grad(node: Node) -> bool:
    if isinstance(node, Linear):
        return any(each is not None and each.requires_grad for each in node[:3])
    if node.name == "detach":
        return False
    return any(
        requires_grad(each)
        if isinstance(each, (Linear, Apply))
        else isinstance(each, (Tensor, Vector)) and _plain(each).requires_grad
        for each in node.operands
    )


def mixes_classes(node: Node) -> bool:
    if isinstance(node, Linear):
        return False
    operands = (each for each in node.operands if isinstance(each, (Linear, Apply)))
    return node.name in MIX_CLASSES or any(mixes_classes(each) for each in operands)


def changed(
    node: Node,
    rows: Callable[[Tensor], Tensor] | None = None,
    classes: Callable[[Tensor], Tensor] | None = None,
    scalars: Callable[[Tensor], Tensor] | None = None,
) -> Node:
    """The same tree of other tensors: `rows` of the inputs, `classes` of weights, biases and vectors,
    `scalars` of all other tensors."""

    def of(change: Callable[[Tensor], Tensor] | None, tensor: Tensor) -> Tensor:
        return tensor if change is None else change(tensor)

    if isinstance(node, Linear):
        bias = None if node.bias is None else of(classes, node.bias)
        return linear(of(rows, node.input), of(classes, node.weight), bias, node.autocast)
    operands: list[object] = []
    for each in node.operands:
        if isinstance(each, (Linear, Apply)):
            operands.append(changed(each, rows, classes, scalars))
        elif isinstance(each, Vector):
            operands.append(Vector(of(classes, each.tensor)))
        else:
            operands.append(of(scalars, each) if isinstance(each, Tensor) else each)
    return Apply(node.name, tuple(operands), node.autocast)


def check(node: Node) -> None:
    """That nobody has changed or freed what the logits are made of since the head was called."""
    for each in linears(node):
        weight, V = each.weight, each.weight.shape[0]
        if V == 0 or _freed(weight):
            raise RuntimeError(
                "the head's weight has been freed since the head was called: it is sharded, and gathered "
                "only within the head's own forward. With FSDP2 keep it until backward, by "
                "fully_shard(head, reshard_after_forward=False) or head.set_reshard_after_forward(False), or "
                "shard the head with its parent; else undo() the deferral"
            )
        if each.versions and each.versions != _versions(each.input, weight, each.bias):
            raise RuntimeError(
                "these logits are computed only when they are needed, and the hidden states or the head's "
                "weight have been changed in place since the head was called (by optimizer.step()?); use the "
                "logits before that, or keep what you need of them (such as logits.argmax(-1))"
            )


def _freed(weight: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is not None:
        return False
    return weight.numel() > 0 and weight.untyped_storage().size() == 0


def _versions(*tensors: Tensor | None) -> tuple[int, ...]:
    if torch.compiler.is_compiling():  # a version is not known there, and not checked later
        return ()
    return tuple(each._version for each in tensors if each is not None and not each.is_inference())


def _operand(each: object) -> object:
    if isinstance(each, (Linear, Apply)):
        return run(each)
    return _plain(each) if isinstance(each, (Tensor, Vector)) else each


def _plain(each: Tensor | Vector) -> Tensor:
    return each.tensor if isinstance(each, Vector) else each
