"""Differentiate tensors by new variables, by torch.autograd alone."""

from collections.abc import Sequence

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]
Both = tuple[Tensors, Tensors]
"""Results of rows, and sums over rows; a signature that spells this out ends compiled graphs."""


def as_variables(tensors: Tensors) -> Tensors:
    """Return these tensors as new variables to differentiate by, within the existing graph."""
    with torch.enable_grad():
        return tuple(
            tensor.view_as(tensor)
            if tensor.requires_grad
            else tensor.detach().requires_grad_(is_continuous(tensor))
            for tensor in tensors
        )


def is_continuous(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def with_variables(tensors: Tensors, places: Sequence[int]) -> tuple[Tensors, Tensors]:
    """Return the tensors with those at `places` replaced by new variables, and these variables."""
    variables = as_variables(at(places, tensors))
    by_place = dict(zip(places, variables))
    return tuple(by_place.get(place, tensor) for place, tensor in enumerate(tensors)), variables


def vector_jacobian(outputs: Tensors, inputs: Tensors, grad_output: Tensors, create_graph: bool) -> Tensors:
    """Return the gradients of the inputs, given those of the outputs.

    This uses torch.autograd, because the first use of torch.func imports Dynamo, which takes 2 s.
    """
    return filled(grad(outputs, inputs, grad_output, create_graph), inputs)


def jacobian_vector(outputs: Tensors, inputs: Tensors, moving: Tensors, create_graph: bool) -> Tensors:
    """Return the tangents of the outputs, given those of the inputs.

    The vector-Jacobian product is linear in the upstream gradients; its own vector-Jacobian product
    is the Jacobian-vector product. Forward mode is not used, since it does not nest and may be
    active.
    """
    seeds = tuple(torch.zeros_like(each).requires_grad_() for each in outputs)
    pulled = grad(outputs, inputs, seeds, True)
    return filled(grad(pulled, seeds, moving, create_graph), seeds)


def grad(
    outputs: Sequence[Tensor | None], inputs: Tensors, grad_output: Tensors, create_graph: bool
) -> tuple[Tensor | None, ...]:
    """Return gradients, None for inputs on which no output depends.

    An output without a graph depends on no input and is left out.
    """
    pairs = [
        (each, gradient.to(each.dtype))
        for each, gradient in zip(outputs, grad_output)
        if each is not None and each.requires_grad
    ]
    if not pairs:
        return (None,) * len(inputs)
    return torch.autograd.grad(
        [each for each, _ in pairs],
        inputs,
        [gradient for _, gradient in pairs],
        create_graph=create_graph,
        allow_unused=True,
    )


def filled(found: Sequence[Tensor | None], like: Tensors) -> Tensors:
    return tuple(torch.zeros_like(own) if each is None else each for each, own in zip(found, like))


def at(places: Sequence[int], tensors: Tensors) -> Tensors:
    return tuple(tensors[place] for place in places)


def split(tensors: Sequence[Tensor], place: int) -> tuple[Tensors, Tensors]:
    return tuple(tensors[:place]), tuple(tensors[place:])
