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

from lowtide.deferred.operands import Recorded, record

Node = Union["Linear", "Apply"]
Change = Callable[[Tensor], Tensor]

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

    input: Recorded  # [..., D]
    weight: Recorded  # [V, D]
    bias: Tensor | None  # [V]
    autocast: torch.dtype | None
    """Autocast's dtype there, None where it was off."""
    dtype: torch.dtype
    """Of the product."""


class Vector(NamedTuple):
    """An operand with a number for each class."""

    tensor: Tensor  # [V]


class Apply(NamedTuple):
    """FUNCTIONS[name](*operands): nodes, vectors, and what suits any row and class (numbers, dtypes)."""

    name: str
    operands: tuple[object, ...]
    autocast: torch.dtype | None
    dtype: torch.dtype
    """Of the result, by torch's own promotion."""


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def run(node: Node) -> Tensor:
    """The logits of the rows and classes that the tree has."""
    with as_recorded(device(node), node.autocast):
        if isinstance(node, Linear):
            return F.linear(node.input.value(), node.weight.value(), node.bias)
        return FUNCTIONS[node.name](*(_operand(each) for each in node.operands))


def as_recorded(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Autocast as it was: the loss is often computed elsewhere."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def leading(node: Node) -> torch.Size:
    """Return the shape of the rows in the tree; the logits may arrange them in another."""
    return next(linears(node)).input.tensor.shape[:-1]


def device(node: Node) -> torch.device:
    return next(linears(node)).input.tensor.device


def linears(node: Node) -> Iterator[Linear]:
    if isinstance(node, Linear):
        yield node
    else:
        for each in node.operands:
            if isinstance(each, (Linear, Apply)):
                yield from linears(each)


def requires_grad(node: Node) -> bool:
    if isinstance(node, Linear):
        tensors = (node.input.tensor, node.weight.tensor, node.bias)
        return any(each is not None and each.requires_grad for each in tensors)
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
    node: Node, rows: Change | None = None, classes: Change | None = None, scalars: Change | None = None
) -> Node:
    """The same tree of other tensors: `rows` of the inputs, `classes` of weights, biases and vectors,
    `scalars` of all other tensors. All of the old ones are checked."""

    if isinstance(node, Linear):
        input, weight = node.input.value(), node.weight.value()
        return node._replace(
            input=node.input if rows is None else record(rows(input)),
            weight=node.weight if classes is None else record(classes(weight)),
            bias=None if node.bias is None else _by(classes, node.bias),
        )
    operands: list[object] = []
    for each in node.operands:
        if isinstance(each, (Linear, Apply)):
            operands.append(changed(each, rows, classes, scalars))
        elif isinstance(each, Vector):
            operands.append(Vector(_by(classes, each.tensor)))
        else:
            operands.append(_by(scalars, each) if isinstance(each, Tensor) else each)
    return node._replace(operands=tuple(operands))


def _by(change: Change | None, tensor: Tensor) -> Tensor:
    return tensor if change is None else change(tensor)


def check(node: Node) -> None:
    """Raise where a tensor that the logits are made of has changed."""
    for each in linears(node):
        each.input.value()
        each.weight.value()


def _operand(each: object) -> object:
    if isinstance(each, (Linear, Apply)):
        return run(each)
    return _plain(each) if isinstance(each, (Tensor, Vector)) else each


def _plain(each: Tensor | Vector) -> Tensor:
    return each.tensor if isinstance(each, Vector) else each
