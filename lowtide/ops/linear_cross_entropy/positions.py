"""Check the arguments of a K-dimensional loss, and make a head of them.

Such a loss has a head [V, D] for each of P = d1 ... dK positions. All positions have the same rows,
and are computed one after the other. If P is 1, the loss is that of one head. Otherwise a mean or
sum is one call of the operator, which accumulates the input gradient over positions. With
reduction="none" each position is a call of its own.

Shapes: N rows, D features, V classes, P positions.
"""

import math
from typing import Any

from torch import Tensor

from lowtide.core.checks import check_tensors
from lowtide.core.errors import ArgumentError
from lowtide.ops.linear_cross_entropy.definition import advice
from lowtide.ops.linear_cross_entropy.definition.head import (
    Arguments,
    Head,
    Labels,
    Options,
    scale_of,
    tensors_by_row,
    with_rows,
)
from lowtide.ops.linear_cross_entropy.definition.validation import (
    check_arguments,
    check_loss,
    check_target_dtype,
)


def call_of(
    input: Tensor,  # [N, D]
    linear_weight: Tensor,  # [V, d1, ..., dK, D]
    target: Tensor,  # [N, d1, ..., dK] or [N, V, d1, ..., dK]
    *,
    linear_bias: Tensor | None,  # [V, d1, ..., dK]
    **given: Any,
) -> tuple[Head, Labels, Options]:
    """Return the arguments of `dispatch.run`, whose result for "none" is [N, P], or [N] if P is 1.

    `given` are fields of `Arguments`.
    """
    arguments = Arguments(**given)
    check_tensors({"input": input, "linear_weight": linear_weight, "target": target})
    if linear_bias is not None:
        check_tensors({"linear_bias": linear_bias})
    check_target_dtype(target)
    V, *dims = linear_weight.shape[:-1]
    probabilities = target.is_floating_point()
    _check_shapes(input, linear_weight, target, linear_bias, sharded=arguments.shard is not None)
    N, D = input.shape[0], linear_weight.shape[-1]
    check_arguments(  # with shapes of one position, as there may be none
        (input,),
        (_like(linear_weight, V, D),),
        _like(target, N, V) if probabilities else _like(target, N),
        None if linear_bias is None else _like(linear_bias, V),
        arguments,
    )
    check_loss(arguments, target, input, (N, *dims))
    # A single position gets no dimension: it is flattened into that of the classes or the rows.
    joined = len(dims) + 1 if math.prod(dims) == 1 else len(dims)
    head = Head(
        (input,),
        (linear_weight.flatten(-joined - 1, -2),),
        None if linear_bias is None else linear_bias.flatten(-joined),
        scale_of(arguments.logit_scale, input),
    )
    labels = Labels.of(target, arguments, input)
    labels = with_rows(labels, [each.flatten(-joined) for each in tensors_by_row(labels).values()])
    return head, labels, Options.of(input, arguments)


def _check_shapes(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, *, sharded: bool
) -> None:
    V, *dims = linear_weight.shape[:-1]
    if sharded and 0 in dims:
        raise ArgumentError(f"linear_weight must have at least one position, got dimensions {dims}")
    if input.dim() != 2:
        raise ArgumentError(
            "input must have shape [N, D] where linear_weight has more than two dimensions "
            f"(a K-dimensional loss), got {list(input.shape)}; flatten rows of it and of target alike"
        )
    expected = [input.shape[0], V, *dims] if target.is_floating_point() else [input.shape[0], *dims]
    if list(target.shape) != expected:
        raise ArgumentError(
            f"target must have shape {expected}, got {list(target.shape)}"
            + advice.for_target(input, linear_weight, target, expected)
        )
    if linear_bias is not None and list(linear_bias.shape) != [V, *dims]:
        raise ArgumentError(f"linear_bias must have shape {[V, *dims]}, got {list(linear_bias.shape)}")
    if (
        V == 0 and not sharded and target.numel() and not target.is_floating_point() and len(dims) != 2
    ):  # the same condition as in torch
        raise ArgumentError("linear_weight must have at least one class where target holds class indices")


def _like(tensor: Tensor, *shape: int) -> Tensor:
    """Return a tensor of this shape, of the same dtype and device, without memory for its data."""
    return tensor.new_empty(()).expand(shape)
