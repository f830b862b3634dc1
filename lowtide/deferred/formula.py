"""From a tree to the head that the fused operators take, where it is one:

    logits = softcap tanh(scale (sum_k x_k W_k^T + b) / softcap)

Shapes: [...] are the rows, D_k features of term k, V classes.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowtide.deferred.tree import Apply, Linear, Node, Vector


class Formula(NamedTuple):
    """cap tanh(scale u / divisor), or scale u / divisor, of u = sum_k x_k W_k^T + b."""

    inputs: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    bias: Tensor | None
    autocast: torch.dtype | None
    scale: float | Tensor = 1.0
    divisor: float = 1.0
    """Apart from the scale, so that / 30 and * 30 leave exactly 1."""
    cap: float | None = None

    def arguments(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], dict[str, Any]]:
        """Of lowtide.linear_cross_entropy.entry's functions, but for the target."""
        inputs, weights, bias = self.inputs, self.weights, self.bias
        if self.autocast is None:  # which would cast them; a late term follows the first
            dtype = inputs[0].dtype
            inputs = tuple(each.to(dtype) for each in inputs)
            weights = tuple(each.to(dtype) for each in weights)
            bias = None if bias is None else bias.to(dtype)
        scale = self.scale * (self.cap or 1.0) / self.divisor
        options = {"linear_bias": bias, "softcap": self.cap, "logit_scale": None if _is_one(scale) else scale}
        return inputs, weights, options


def formula(node: Node) -> Formula | None:
    """None where the tree is something else."""
    if isinstance(node, Linear):
        return Formula((node.input,), (node.weight,), node.bias, node.autocast)
    first, *rest = node.operands
    if isinstance(first, Vector) and node.name == "add":
        first, rest = rest[0], [first]
    if not isinstance(first, (Linear, Apply)):
        return None
    found = formula(first)
    if found is None:
        return None
    match node.name, rest:
        case "clone", []:
            return found
        case "detach", []:
            return _detached(found)
        case "to", [dtype]:
            # float32 is what the loss is computed in anyway; float64 is not, and must stay what it is.
            exact = (found.inputs[0].dtype == torch.float64) == (dtype == torch.float64)
            return found if exact else None
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


def _scaled(found: Formula, factor: object) -> Formula | None:
    if isinstance(factor, Tensor):
        return found._replace(scale=found.scale * factor.reshape(())) if found.cap is None else None
    if not isinstance(factor, (int, float)) or not 0 < abs(factor) < float("inf"):
        return None
    if found.cap is None:
        return found._replace(scale=found.scale * factor)
    return found._replace(cap=found.cap * factor) if factor > 0 else None


def _divided(found: Formula, divisor: object) -> Formula | None:
    if isinstance(divisor, (int, float)) and found.cap is None and 0 < abs(divisor) < float("inf"):
        return found._replace(divisor=found.divisor * divisor)
    if isinstance(divisor, Tensor):
        return _scaled(found, 1 / divisor)
    return _scaled(found, 1 / divisor) if isinstance(divisor, (int, float)) and divisor else None


def _shifted(found: Formula, bias_V: Tensor) -> Formula | None:
    if found.cap is not None:
        return None
    scale = found.scale / found.divisor
    bias_V = bias_V if _is_one(scale) else bias_V / scale
    return found._replace(bias=bias_V if found.bias is None else found.bias + bias_V)


def _sum(one: Formula, other: Formula | None) -> Formula | None:
    if other is None or one.cap is not None or other.cap is not None or one.autocast != other.autocast:
        return None
    one, other = _unscaled(one), _unscaled(other)
    biases = [each.bias for each in (one, other) if each.bias is not None]
    return Formula(
        one.inputs + other.inputs, one.weights + other.weights, sum(biases) if biases else None, one.autocast
    )


def _unscaled(found: Formula) -> Formula:
    """With its scale in the inputs: of an adapter they are few numbers."""
    scale = found.scale / found.divisor
    if _is_one(scale):
        return found
    bias = None if found.bias is None else found.bias * scale
    return Formula(tuple(each * scale for each in found.inputs), found.weights, bias, found.autocast)


def _detached(found: Formula) -> Formula:
    return found._replace(
        inputs=tuple(each.detach() for each in found.inputs),
        weights=tuple(each.detach() for each in found.weights),
        bias=None if found.bias is None else found.bias.detach(),
        scale=found.scale.detach() if isinstance(found.scale, Tensor) else found.scale,
    )


def _is_one(scale: object) -> bool:
    return isinstance(scale, (int, float)) and scale == 1
