"""Represent logits as a small tree of products and of operations on them.

The tree has the operations as the model's code called them. Evaluated on all rows, it gives the
logits bit for bit. No operation mixes rows, so the tree can also be evaluated on some of the rows.
If no operation mixes classes, the same holds for classes.

`RecordedTensor.value` is the only way from the tree to the model's tensors, and refuses those that
have changed since they were recorded. Small operands (one number, or one for each class) are
copied, so the originals may change.

Shapes: [...] are the rows, D features, V classes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.autodiff import in_transform
from lowtide.core.collectives import is_dtensor
from lowtide.deferred.recorded.sharded import whole
from lowtide.deferred.recorded.steps import Memory
from lowtide.ops.linear_cross_entropy.data_sharded import is_data_sharded

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


class RecordedTensor(NamedTuple):
    """Hold hidden states or a weight, shared with the model."""

    tensor: Tensor
    version: int | None
    """The version counter; None if the head was called where there is none (torch.compile)."""
    memory: Memory | None = None
    """Identifies the model's memory that the tensor was made of, for the steps of optimizers."""

    def value(self) -> Tensor:
        """Return the tensor; raise an error if it has since been changed or freed."""
        if _is_freed(self.tensor):
            raise RuntimeError(
                "the head's weight has been freed since the head was called: it is sharded, and gathered "
                "only within the head's own forward. With FSDP2 keep it until backward, by "
                "fully_shard(head, reshard_after_forward=False) or head.set_reshard_after_forward(False), or "
                "shard the head with its parent; else undo() the deferral"
            )
        # Code that torch.compile traces cannot read a version.
        if not torch.compiler.is_compiling() and self.version not in (None, version(self.tensor)):
            raise RuntimeError(
                "these logits are computed only when they are needed, and the hidden states or the head's "
                "weight have been changed in place since the head was called (by optimizer.step()?); use the "
                "logits before that, or keep what you need of them (such as logits.argmax(-1))"
            )
        return self.tensor


class Linear(NamedTuple):
    """Hold one product, as F.linear would have computed it where the head was called."""

    input: RecordedTensor  # [..., D]
    weight: RecordedTensor  # [V, D]
    bias: Tensor | None  # [V]
    autocast: torch.dtype | None
    """Autocast's dtype where the head was called; None if autocast was off."""
    dtype: torch.dtype
    """The product's dtype."""


class Vector(NamedTuple):
    """Hold an operand with one number for each class."""

    tensor: Tensor  # [V]


class Apply(NamedTuple):
    """Hold FUNCTIONS[name](*operands).

    Operands are nodes, of which the first is one, vectors, and values that are the same for all
    rows and classes (numbers, dtypes).
    """

    name: str
    operands: tuple[object, ...]
    autocast: torch.dtype | None
    dtype: torch.dtype
    """The result's dtype, by torch's own promotion."""

    @property
    def first(self) -> Node:
        return self.operands[0]  # type: ignore[return-value]


def evaluate(node: Node) -> Tensor:
    """Return the logits of the tree's rows and classes."""
    with autocast(hidden(node).device, node.autocast):
        if isinstance(node, Linear):
            input = node.input.value()
            return F.linear(input, *(whole(each, input) for each in (node.weight.value(), node.bias)))

        def value(operand: object) -> object:
            if isinstance(operand, (Linear, Apply)):
                return evaluate(operand)
            return operand.tensor if isinstance(operand, Vector) else operand

        return FUNCTIONS[node.name](*(value(each) for each in node.operands))


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Set autocast as it was when the operation was recorded, since the loss may run elsewhere."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the autocast that is active; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def linears(node: Node) -> Iterator[Linear]:
    """Yield the products of the tree."""
    if isinstance(node, Linear):
        yield node
    for each in _nodes(node):
        yield from linears(each)


def tensors(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that the logits depend on, first the input of the first product."""
    for each in _nodes(node):
        yield from tensors(each)
    yield from _own_tensors(node)


def _nodes(node: Node) -> list[Node]:
    if isinstance(node, Linear):
        return []
    return [each for each in node.operands if isinstance(each, (Linear, Apply))]


def _own_tensors(node: Node) -> list[Tensor]:
    if isinstance(node, Linear):
        own = [node.input.tensor, node.weight.tensor, node.bias]
    else:
        own = [each.tensor if isinstance(each, Vector) else each for each in node.operands]
    return [each for each in own if isinstance(each, Tensor)]


def hidden(node: Node) -> Tensor:
    """Return the input of the first product, [..., D]; the logits may arrange rows differently."""
    return next(linears(node)).input.tensor


def requires_grad(node: Node) -> bool:
    if isinstance(node, Apply) and node.name == "detach":
        return False
    return any(map(requires_grad, _nodes(node))) or any(each.requires_grad for each in _own_tensors(node))


def mixes_classes(node: Node) -> bool:
    own = isinstance(node, Apply) and node.name in MIX_CLASSES
    return own or any(map(mixes_classes, _nodes(node)))


def check(node: Node) -> None:
    """Raise an error if a tensor that the logits depend on has changed."""
    for each in linears(node):
        each.input.value()
        each.weight.value()


def with_tensors(
    node: Node, rows: Change | None = None, classes: Change | None = None, scalars: Change | None = None
) -> Node:
    """Return the same tree with other tensors; raise an error if an old one has changed.

    `rows` maps the inputs, `classes` the weights, biases and vectors, `scalars` all other tensors.
    """
    if isinstance(node, Linear):
        input, weight = node.input.value(), node.weight.value()
        memory = node.input.memory, node.weight.memory
        return node._replace(
            input=node.input if rows is None else record(rows(input), memory[0]),
            weight=node.weight if classes is None else record(classes(whole(weight, input)), memory[1]),
            bias=node.bias if classes is None or node.bias is None else classes(whole(node.bias, input)),
        )

    def changed(operand: object) -> object:
        if isinstance(operand, (Linear, Apply)):
            return with_tensors(operand, rows, classes, scalars)
        if isinstance(operand, Vector) and classes is not None:
            return Vector(classes(operand.tensor))
        return scalars(operand) if isinstance(operand, Tensor) and scalars is not None else operand

    return node._replace(operands=tuple(changed(each) for each in node.operands))


def is_sharded(node: Node) -> bool:
    """Return whether the classes of a product are divided over ranks."""
    return any(is_dtensor(each.weight.tensor) for each in linears(node))


def data_mesh(node: Node) -> Any:
    """Return the mesh of a head of `lowtide.shard_head` in the tree; None if there is none."""
    weights: Any = (each.weight.tensor for each in linears(node))
    return next((each.device_mesh for each in weights if is_data_sharded(each)), None)


def with_whole_weights(node: Node) -> Node:
    """Return the same tree with weights of all classes; all ranks have to call this."""
    return with_tensors(node, classes=lambda tensor: tensor) if is_sharded(node) else node


def with_first_input(node: Node, change: Change) -> Node:
    """Return the same tree with another input of its first product."""
    changes = iter([change])
    return with_tensors(node, rows=lambda x: next(changes, lambda x: x)(x))


def record(tensor: Tensor, memory: Memory | None = None) -> RecordedTensor:
    """Record a tensor whose data no other code can replace."""
    return RecordedTensor(tensor, version(tensor), memory)


def record_shared(tensor: Tensor) -> RecordedTensor:
    """Record a model's tensor by an alias, which keeps its memory if `tensor.data` is replaced."""
    if torch.compiler.is_compiling():  # A view of a parameter has a node, as an alias has.
        is_plain = isinstance(tensor, torch.nn.Parameter) and not is_dtensor(tensor)
        return record(tensor.view_as(tensor) if is_plain else tensor)
    # An alias would lose the tangent of forward mode, and the level of a transform.
    if in_transform(tensor):
        return record(tensor)
    if tensor.is_inference():  # Without a version counter a change would go unnoticed.
        return record(tensor.clone())
    memory = Memory(tensor)
    if is_dtensor(tensor):
        return record(tensor, memory)
    tracked = tensor.requires_grad and torch.is_grad_enabled()
    return record(_Alias.apply(tensor, memory) if tracked else tensor.detach(), memory)


def version(tensor: Tensor) -> int | None:
    """Return the tensor's version counter, or None where there is none."""
    return None if torch.compiler.is_compiling() or tensor.is_inference() else tensor._version


def _is_freed(tensor: Tensor) -> bool:
    if torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    own: Tensor = tensor._local_tensor if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return own.numel() > 0 and own.untyped_storage().size() == 0


class _Alias(torch.autograd.Function):
    """Give a tensor its own node in the autograd graph, as an output of the head would have.

    FSDP2 attaches hooks to the node, and DistributedDataParallel follows it to the weight.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: Tensor, memory: Memory) -> Tensor:
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.memory = inputs  # for as long as the graph may be differentiated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent
