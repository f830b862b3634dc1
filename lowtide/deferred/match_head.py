"""Match an expression with the head that the fused operators support:

    logits = softcap tanh(scale (sum_k x_k W_k^T + b) / softcap)

An expression does not match if the operators would compute it in fewer digits than torch does, or
would divide by what may be 0.

Shapes: [...] are the rows, D_k features of term k, V classes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.deferred.expression import Apply, Linear, Node, Vector

# float16 inputs can be multiplied by a float in this range and keep most of theirs.
SMALLEST, LARGEST = 2.0**-6, 2.0**6
# float32 represents a float in this range with all its digits.
NORMAL = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Formula(NamedTuple):
    """Hold cap tanh(scale u / divisor), or scale u / divisor, of u = sum_k x_k W_k^T + b."""

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    """In the dtype of the products, or of their sums."""
    autocast: torch.dtype | None
    dtype: torch.dtype
    """The products' dtype."""
    scale: float | Tensor = 1.0
    divisor: float = 1.0
    """Apart from the scale, so that / 30 and * 30 leave exactly 1."""
    cap: float | None = None

    @property
    def sum_dtype(self) -> torch.dtype:
        """Return the dtype that the operators compute in."""
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def factor(self) -> float | Tensor:
        """Return the product of all that u is multiplied by."""
        return self.scale * (self.cap or 1.0) / self.divisor

    def arguments(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], dict[str, Any]]:
        """Return inputs, weights and options for lowtide.ops.linear_cross_entropy.dispatch.

        The target is not among them.
        """
        factor = self.factor
        options = {
            "linear_bias": self.bias,
            "softcap": self.cap,
            "logit_scale": None if _is_one(factor) else factor,
        }
        return self.inputs, self.weights, options


def formula(node: Node) -> Formula | None:
    """Return the formula of the expression, or None if it has none."""
    if isinstance(node, Linear):
        head = node.input.value(), node.weight.value()
        return Formula((head[0],), (head[1],), node.bias, node.autocast, node.dtype)
    first, *rest = node.operands
    if isinstance(first, Vector) and node.name == "add":
        first, rest = rest[0], [first]
    if not isinstance(first, (Linear, Apply)):
        return None
    below = formula(first)
    found = None if below is None else _applied(below, node.name, rest)
    return found if found is not None and _is_sound(found, node.dtype) else None


def _applied(found: Formula, name: str, rest: list[object]) -> Formula | None:
    match name, rest:
        case "clone", []:
            return found
        case "detach", []:
            return _detached(found)
        case "to", [torch.dtype()]:
            return found
        case "neg", []:
            return _scaled(found, -1.0)
        case "mul", [factor]:
            return _scaled(found, factor)
        case "div", [divisor]:
            return _divided(found, divisor)
        case "tanh", []:
            return found._replace(cap=1.0) if found.cap is None else None
        case "add", [Vector(bias_V)]:
            return _shifted(found, bias_V)
        case "sub", [Vector(bias_V)]:
            return _shifted(found, -bias_V)
        case "add", [Linear() | Apply() as other]:
            return _sum(found, formula(other))
    return None


def _is_sound(found: Formula, dtype: torch.dtype) -> bool:
    """Return whether the operators keep the digits of `dtype`, the dtype of torch's result.

    float64 must stay float64, and nothing else may become it.
    """
    wide, sum_dtype = torch.float64, found.sum_dtype
    digits = torch.promote_types(dtype, sum_dtype) == sum_dtype and (dtype == wide) == (sum_dtype == wide)
    factors = (found.factor, found.cap or 1.0)
    return digits and all(isinstance(each, Tensor) or _is_normal(each) for each in factors)


def _scaled(found: Formula, factor: object) -> Formula | None:
    if isinstance(factor, Tensor):
        if found.cap is not None:
            return None
        return found._replace(scale=found.scale * factor.reshape(()).to(found.sum_dtype))
    if not _is_normal(factor):
        return None
    if found.cap is None:
        return found._replace(scale=found.scale * factor)  # type: ignore[operator]
    return found._replace(cap=found.cap * factor) if factor > 0 else None  # type: ignore[operator]


def _divided(found: Formula, divisor: object) -> Formula | None:
    if isinstance(divisor, Tensor):
        return _scaled(found, 1 / divisor.to(found.sum_dtype))
    if not _is_normal(divisor):
        return None
    if found.cap is None:
        return found._replace(divisor=found.divisor * divisor)  # type: ignore[operator]
    return _scaled(found, 1 / divisor)  # type: ignore[operator]


def _shifted(found: Formula, bias_V: Tensor) -> Formula | None:
    """Add a bias, unless there is a scale already, by which it would have to be divided."""
    if found.cap is not None or not _is_one(found.factor):
        return None
    return found._replace(bias=_sum_of_biases(found, found.bias, bias_V))


def _sum(one: Formula, other: Formula | None) -> Formula | None:
    if other is None or one.cap is not None or other.cap is not None:
        return None
    if (one.autocast, one.dtype) != (other.autocast, other.dtype):
        return None  # A float32 adapter beside a bfloat16 head.
    left, right = _unscaled(one), _unscaled(other)
    if left is None or right is None:
        return None
    return left._replace(
        inputs=left.inputs + right.inputs,
        weights=left.weights + right.weights,
        bias=_sum_of_biases(left, left.bias, right.bias),
    )


def _sum_of_biases(found: Formula, one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Add biases in the dtype of sums, so that nothing is rounded."""
    biases = [each.to(found.sum_dtype) for each in (one, other) if each is not None]
    return sum(biases[1:], biases[0]) if biases else None


def _unscaled(found: Formula) -> Formula | None:
    """Multiply the inputs by the scale; an adapter's inputs are small.

    Half-precision inputs must not underflow or overflow by it.
    """
    factor = found.factor
    if _is_one(factor):
        return found
    half = found.dtype != found.sum_dtype
    if half and (isinstance(factor, Tensor) or not SMALLEST <= abs(factor) <= LARGEST):
        return None
    inputs = tuple(each * factor for each in found.inputs)
    if any(each.dtype != old.dtype for each, old in zip(inputs, found.inputs)):
        return None
    bias = None if found.bias is None else found.bias.to(found.sum_dtype) * factor
    return found._replace(inputs=inputs, bias=bias, scale=1.0, divisor=1.0)


def _detached(found: Formula) -> Formula:
    return found._replace(
        inputs=tuple(each.detach() for each in found.inputs),
        weights=tuple(each.detach() for each in found.weights),
        bias=None if found.bias is None else found.bias.detach(),
        scale=found.scale.detach() if isinstance(found.scale, Tensor) else found.scale,
    )


def _is_one(factor: object) -> bool:
    return isinstance(factor, (int, float)) and factor == 1


def _is_normal(factor: object) -> bool:
    """Return whether the factor is a normal number: not 0, subnormal, infinite or NaN."""
    return isinstance(factor, (int, float)) and NORMAL[0] <= abs(factor) <= NORMAL[1]
