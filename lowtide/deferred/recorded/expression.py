"""Represent logits as a small tree of products and of operations on them.

The tree has the operations as the model's code called them. Evaluated on all rows, it gives the
logits bit for bit. No operation mixes rows, so the tree can also be evaluated on some of the rows.
If no operation mixes classes, the same holds for classes.

`RecordedTensor.value` is the only way from the tree to the model's tensors, and refuses those that
have changed since they were recorded. Small operands (one number, or one for each class) are
copied, so the originals may change.

Shapes: [...] are the rows, D features, V classes.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.core.autodiff import in_transform
from lowtide.core.collectives import is_dtensor, part_of_rank
from lowtide.deferred.recorded.sharded import whole
from lowtide.deferred.recorded.steps import Memory
from lowtide.ops.linear_cross_entropy.data_sharded import is_data_sharded

Node = Union["Linear", "Apply"]
Change = Callable[[Tensor], Tensor]
Value = TypeVar("Value")

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


def product(linear: Linear) -> Tensor:
    """Return a product, as F.linear computes it."""
    input = linear.input.value()
    with autocast(input.device, linear.autocast):
        return F.linear(input, *(whole(each, input) for each in (linear.weight.value(), linear.bias)))


def evaluate(node: Node, products: Iterable[Tensor] | None = None) -> Tensor:
    """Return the logits of the tree's rows and classes.

    `products` has the values of `linears(node)`; those of None are computed.
    """
    given = None if products is None else iter(products)

    def value(node: Node, operands: list[Tensor]) -> Tensor:
        if isinstance(node, Linear):
            return product(node) if given is None else next(given)
        values = replaced(node, operands, lambda each: each.tensor if isinstance(each, Vector) else each)
        with autocast(operands[0].device, node.autocast):
            return FUNCTIONS[node.name](*values)

    return fold(node, value)


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    """Set autocast as it was when the operation was recorded, since the loss may run elsewhere."""
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of the autocast that is active; None if it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def fold(node: Node, function: Callable[[Node, list[Value]], Value]) -> Value:
    """Return function(node, values), where `values` are found in the same way for its operands.

    It is called once for each node, in a fixed order. Operations may share nodes: log p of p log p.
    """
    return _fold(node, function, [])


def _fold(
    node: Node, function: Callable[[Node, list[Value]], Value], found: list[tuple[Node, Value]]
) -> Value:
    for known, result in found:  # Code that torch.compile traces may not ask for an id.
        if known is node:
            return result
    result = function(node, [_fold(each, function, found) for each in _nodes(node)])
    found.append((node, result))
    return result


def replaced(node: Apply, nodes: Iterable[object], other: Callable[[object], object]) -> tuple[Any, ...]:
    """Return the operands with these in place of nodes, and `other` of all others."""
    each = iter(nodes)
    return tuple(next(each) if isinstance(own, (Linear, Apply)) else other(own) for own in node.operands)


def every(node: Node) -> list[Node]:
    """Return the nodes of the tree, each once, operands first."""
    nodes: list[Node] = []
    fold(node, lambda each, _: nodes.append(each))
    return nodes


def linears(node: Node) -> list[Linear]:
    """Return the products of the tree."""
    return [each for each in every(node) if isinstance(each, Linear)]


def tensors(node: Node) -> Iterator[Tensor]:
    """Yield the tensors that the logits depend on, first the input of the first product."""
    for each in every(node):
        yield from _own_tensors(each)


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
    return linears(node)[0].input.tensor


def requires_grad(node: Node) -> bool:
    def does(node: Node, operands: list[bool]) -> bool:
        if isinstance(node, Apply) and node.name == "detach":
            return False
        return any(operands) or any(each.requires_grad for each in _own_tensors(node))

    return fold(node, does)


def below(node: Node, name: str) -> Node | None:
    """Return the first operand of an operation of this name; None of any other node."""
    return node.first if isinstance(node, Apply) and node.name == name else None


def mixes_classes(node: Node) -> bool:
    return any(isinstance(each, Apply) and each.name in MIX_CLASSES for each in every(node))


def check(node: Node) -> None:
    """Raise an error if a tensor that the logits depend on has changed."""
    for each in linears(node):
        each.input.value()
        each.weight.value()


def with_tensors(
    node: Node,
    *,
    rows: Change | None = None,
    weights: Change | None = None,
    vectors: Change | None = None,
    scalars: Change | None = None,
) -> Node:
    """Return the same tree with other tensors; raise an error if an old one has changed.

    `rows` maps the inputs, `weights` the weights and biases of products, `vectors` the other
    operands with one number for each class, `scalars` all other tensors.
    """

    def of_linear(node: Linear) -> Node:
        input, weight = node.input.value(), node.weight.value()
        memory = node.input.memory, node.weight.memory
        return node._replace(
            input=node.input if rows is None else record(rows(input), memory[0]),
            weight=node.weight if weights is None else record(weights(whole(weight, input)), memory[1]),
            bias=node.bias if weights is None or node.bias is None else weights(whole(node.bias, input)),
        )

    def other(operand: object) -> object:
        if isinstance(operand, Vector) and vectors is not None:
            return Vector(vectors(operand.tensor))
        return scalars(operand) if isinstance(operand, Tensor) and scalars is not None else operand

    def changed(node: Node, operands: list[Node]) -> Node:
        if isinstance(node, Linear):
            return of_linear(node)
        return node._replace(operands=replaced(node, operands, other))

    return fold(node, changed)


def is_sharded(node: Node) -> bool:
    """Return whether the classes of a product are divided over ranks."""
    return any(is_dtensor(each.weight.tensor) for each in linears(node))


def data_mesh(node: Node) -> Any:
    """Return the mesh of a head of `lowtide.shard_head` in the tree; None if there is none."""
    weights: Any = (each.weight.tensor for each in linears(node))
    return next((each.device_mesh for each in weights if is_data_sharded(each)), None)


def with_whole_weights(node: Node) -> Node:
    """Return the same tree with weights of all classes; all ranks have to call this."""
    return with_tensors(node, weights=lambda tensor: tensor) if is_sharded(node) else node


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
    own = part_of_rank(tensor)
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
