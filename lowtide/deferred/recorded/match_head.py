"""Match an expression with the head that the fused operators support.

That head computes

    logits = softcap tanh(scale (sum_k x_k W_k^T + b) / softcap)

An expression does not match if the operators would compute it in fewer digits than torch does, or
would divide by a number that may be 0.

Shapes: [...] are the rows, D_k features of term k, V classes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.deferred.recorded import expression
from lowtide.deferred.recorded.expression import Linear, Node, Vector, is_sharded, with_whole_weights
from lowtide.deferred.recorded.sharded import detached, takes_vector

# float16 inputs keep most of their digits if they are multiplied by a float in this range.
SMALLEST, LARGEST = 2.0**-6, 2.0**6
# float32 represents a float in this range with all its digits.
NORMAL = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class LinearHead(NamedTuple):
    """Hold the head cap tanh(scale u / divisor), where u = sum_k x_k W_k^T + b.

    A head without a cap is scale u / divisor.
    """

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    """Its dtype is that of the products, or of their sums."""
    autocast: torch.dtype | None
    dtype: torch.dtype
    """The products' dtype."""
    scale: float | Tensor = 1.0
    divisor: float = 1.0
    """It is kept apart from the scale, so that / 30 and * 30 give exactly 1."""
    cap: float | None = None

    def is_same(self, other: "LinearHead") -> bool:
        """Return whether both are made of the same tensors and numbers."""

        def same(one: Any, two: Any) -> bool:
            if isinstance(one, tuple):
                return isinstance(two, tuple) and len(one) == len(two) and all(map(same, one, two))
            tensors = isinstance(one, Tensor) or isinstance(two, Tensor)
            return one is two if tensors else one == two

        return all(map(same, self, other))

    @property
    def classes(self) -> int:
        return self.weights[0].shape[0]

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype that the operators compute in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def factor(self) -> float | Tensor:
        """Return the operators' logit_scale: they compute cap tanh(factor u / cap), or factor u."""
        return self.scale * (self.cap or 1.0) / self.divisor

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of linear_cross_entropy.dispatch that go with inputs and weights."""
        scale = None if _is_one(self.factor) else self.factor
        return {"linear_bias": self.bias, "softcap": self.cap, "logit_scale": scale}


def match_head(node: Node) -> tuple[Node, LinearHead | None]:
    """Return the node and the head that the operators take, or None for the head.

    The operators take a head divided over ranks only if it is a single product. The weights of any
    other divided head are gathered first.
    """
    head = _match(node)
    if is_sharded(node) and (head is None or len(head.weights) > 1):
        node = with_whole_weights(node)
        head = _match(node)
    return node, head


def _match(node: Node) -> LinearHead | None:
    """Return the expression as a head, or None if it has another form."""
    return expression.fold(node, _matched)


def _matched(node: Node, heads: list[LinearHead | None]) -> LinearHead | None:
    """Return the node as a head, given its operands as heads."""
    if isinstance(node, Linear):
        inputs, weights = (node.input.value(),), (node.weight.value(),)
        return LinearHead(inputs, weights, node.bias, node.autocast, node.dtype)
    below, *rest = expression.replaced(node, heads, lambda operand: operand)
    head = None if below is None else _applied(below, node.name, rest)
    return head if head is not None and _is_sound(head, node.dtype) else None


def _applied(head: LinearHead, name: str, rest: list[object]) -> LinearHead | None:
    match name, rest:
        case ("clone", []) | ("to", [torch.dtype()]):
            return head
        case "detach", []:
            return _detached(head)
        case "neg", []:
            return _scaled(head, -1.0)
        case "mul", [factor]:
            return _scaled(head, factor)
        case "div", [divisor]:
            return _divided(head, divisor)
        case "tanh", []:
            return head._replace(cap=1.0) if head.cap is None else None
        case "add", [Vector(bias_V)]:
            return _shifted(head, bias_V)
        case "sub", [Vector(bias_V)]:
            return _shifted(head, -bias_V)
        case "add", [LinearHead() as other]:
            return _scaled(head, 2.0) if other is head else _sum(head, other)
    return None


def _is_sound(head: LinearHead, dtype: torch.dtype) -> bool:
    """Return whether the operators keep the digits of `dtype`, the dtype of torch's result.

    A float64 result must be computed in float64, and no other result may be.
    """
    wide, sum_dtype = torch.float64, head.sum_dtype
    digits = torch.promote_types(dtype, sum_dtype) == sum_dtype and (dtype == wide) == (sum_dtype == wide)
    factors = (head.factor, head.cap or 1.0)
    return digits and all(isinstance(each, Tensor) or _is_normal(each) for each in factors)


def _scaled(head: LinearHead, factor: object) -> LinearHead | None:
    if isinstance(factor, Tensor):
        if head.cap is not None:
            return None
        return head._replace(scale=head.scale * factor.reshape(()).to(head.sum_dtype))
    if not _is_normal(factor):
        return None
    if head.cap is None:
        return head._replace(scale=head.scale * factor)  # type: ignore[operator]
    return head._replace(cap=head.cap * factor) if factor > 0 else None  # type: ignore[operator]


def _divided(head: LinearHead, divisor: object) -> LinearHead | None:
    if isinstance(divisor, Tensor):
        return _scaled(head, 1 / divisor.to(head.sum_dtype))
    if not _is_normal(divisor):
        return None
    if head.cap is None:
        return head._replace(divisor=head.divisor * divisor)  # type: ignore[operator]
    return _scaled(head, 1 / divisor)  # type: ignore[operator]


def _shifted(head: LinearHead, bias_V: Tensor) -> LinearHead | None:
    """Add a bias; return None if the head has a scale, which would have to divide the bias."""
    if head.cap is not None or not _is_one(head.factor) or not takes_vector(head.weights[0], head.bias):
        return None
    return head._replace(bias=_sum_of_biases(head, head.bias, bias_V))


def _sum(one: LinearHead, other: LinearHead) -> LinearHead | None:
    if one.cap is not None or other.cap is not None:
        return None
    if (one.autocast, one.dtype) != (other.autocast, other.dtype):
        return None  # Such as a float32 adapter beside a bfloat16 head.
    left, right = _unscaled(one), _unscaled(other)
    if left is None or right is None:
        return None
    return left._replace(
        inputs=left.inputs + right.inputs,
        weights=left.weights + right.weights,
        bias=_sum_of_biases(left, left.bias, right.bias),
    )


def _sum_of_biases(head: LinearHead, one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add biases in the dtype of sums, so that nothing is rounded."""
    biases = [each.to(head.sum_dtype) for each in (one, other) if each is not None]
    return sum(biases[1:], biases[0]) if biases else None


def _unscaled(head: LinearHead) -> LinearHead | None:
    """Multiply the inputs by the scale; return None if half-precision inputs might lose digits.

    The inputs are copied; those of an adapter are small.
    """
    factor = head.factor
    if _is_one(factor):
        return head
    half = head.dtype != head.sum_dtype
    if half and (isinstance(factor, Tensor) or not SMALLEST <= abs(factor) <= LARGEST):
        return None
    inputs = tuple(each * factor for each in head.inputs)
    if any(each.dtype != old.dtype for each, old in zip(inputs, head.inputs)):
        return None
    bias = None if head.bias is None else head.bias.to(head.sum_dtype) * factor
    return head._replace(inputs=inputs, bias=bias, scale=1.0, divisor=1.0)


def _detached(head: LinearHead) -> LinearHead:
    return head._replace(
        inputs=tuple(each.detach() for each in head.inputs),
        weights=tuple(detached(each) for each in head.weights),
        bias=None if head.bias is None else detached(head.bias),
        scale=head.scale.detach() if isinstance(head.scale, Tensor) else head.scale,
    )


def _is_one(factor: object) -> bool:
    return isinstance(factor, (int, float)) and factor == 1


def _is_normal(factor: object) -> bool:
    """Return whether the factor is a normal number: not 0, subnormal, infinite or NaN."""
    return isinstance(factor, (int, float)) and NORMAL[0] <= abs(factor) <= NORMAL[1]
