"""K-dimensional loss: a head [V, D] for each of P = d1 ... dK positions, one after the other.

Shapes: N rows, D features, V classes, P positions.
"""

from typing import Any

import torch
from torch import Tensor

from lowtide.linear_cross_entropy import entry, reference
from lowtide.linear_cross_entropy.check import ArgumentError, check_loss_options, check_tensors
from lowtide.linear_cross_entropy.head import Options


def cross_entropy(
    input: Tensor,  # [N, D]
    linear_weight: Tensor,  # [V, d1, ..., dK, D]
    target: Tensor,  # [N, d1, ..., dK] or [N, V, d1, ..., dK]
    linear_bias: Tensor | None,  # [V, d1, ..., dK]
    weight: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    check_tensors({"input": input, "target": target})
    if linear_bias is not None:
        check_tensors({"linear_bias": linear_bias})
    V, *dims = linear_weight.shape[:-1]
    probabilities = target.is_floating_point()
    _check_shapes(input, target, linear_bias, V, dims)
    reduction, ignore_index = options["reduction"], options["ignore_index"]
    check_loss_options(target, weight, reduction, ignore_index, options["label_smoothing"], options["z_loss"])
    first = 2 if probabilities else 1
    # One unbind a tensor: its gradient is put together once, not position by position.
    weights = linear_weight.flatten(1, -2).unbind(1)
    biases = [None] * len(weights) if linear_bias is None else linear_bias.flatten(1).unbind(1)
    by_row = "none" if reduction == "none" else "sum"
    losses = [
        entry.cross_entropy(
            (input,), (weight_VD,), part, linear_bias=bias_V, weight=weight, **options | {"reduction": by_row}
        )
        for weight_VD, bias_V, part in zip(weights, biases, target.flatten(first).unbind(first))
    ]
    loss = torch.stack(losses, -1)
    if reduction == "none":
        return loss.unflatten(1, dims)
    if reduction == "sum":
        return loss.sum()
    index = -100 if ignore_index is None else ignore_index
    rows = target.movedim(1, -1) if probabilities else target
    return reference.reduce(loss.flatten(), reference.flat_target(rows), weight, Options(ignore_index=index))


def _check_shapes(input: Tensor, target: Tensor, linear_bias: Tensor | None, V: int, dims: list[int]) -> None:
    if input.dim() != 2:
        raise ArgumentError(
            "input must have shape [N, D] where linear_weight has more than two dimensions "
            f"(a K-dimensional loss), got {list(input.shape)}"
        )
    wanted = [input.shape[0], V, *dims] if target.is_floating_point() else [input.shape[0], *dims]
    if list(target.shape) != wanted:
        raise ArgumentError(f"target must have shape {wanted}, got {list(target.shape)}")
    if linear_bias is not None and list(linear_bias.shape) != [V, *dims]:
        raise ArgumentError(f"linear_bias must have shape {[V, *dims]}, got {list(linear_bias.shape)}")
