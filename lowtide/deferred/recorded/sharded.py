"""Decide which heads divided over ranks the fused operators take, and gather whole weights.

Under tensor parallelism every rank has the same hidden states; under `lowtide.shard_head` each
rank has its own.

Shapes: [...] are the rows, D features, V classes.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lowtide.core.collectives import is_dtensor
from lowtide.core.errors import ArgumentError
from lowtide.core.fsdp import find_sharded
from lowtide.ops.linear_cross_entropy.data_sharded import gathered, is_data_sharded, marked_as


def takes(weight: Any) -> bool:
    """Return True for a DTensor [V, D] that is divided by classes over a mesh of one dimension."""
    return bool(weight.device_mesh.ndim == 1 and weight.placements[0].is_shard(0))


def local_input(input: Any, weight: Any) -> Tensor | None:
    """Return the hidden states as a plain tensor, or None.

    A DTensor must be replicated over the mesh of a tensor-parallel weight; any other gives None.
    """
    if not is_dtensor(input):
        return input  # type: ignore[no-any-return]
    replicated = all(each.is_replicate() for each in input.placements)
    if is_data_sharded(weight) or input.device_mesh != weight.device_mesh or not replicated:
        return None
    own: Tensor = input.to_local(grad_placements=input.placements)
    return own


def by_classes(dims: int) -> tuple[Any, ...]:
    """Return the placements of logits whose classes are divided over ranks."""
    from torch.distributed.tensor import Shard

    return (Shard(dims - 1),)


def transformers_forward(head: nn.Module) -> Callable[..., Any] | None:
    """Return the forward that Transformers' tensor parallelism has put on a head, or None.

    Any other forward, or one that does not gather the logits of all ranks, gives None: deferred
    logits always stand for all classes.
    """
    own = vars(head).get("forward")
    style = getattr(own, "__closure__", None) and inspect.getclosurevars(own).nonlocals.get("self")
    if getattr(own, "__name__", "") != "tp_forward" or not is_dtensor(getattr(head, "weight", None)):
        return None
    layout = getattr(style, "output_layouts", None)
    gathers = layout is not None and layout.is_replicate() and getattr(style, "use_local_output", False)
    return own if gathers else None


def copied(bias: Tensor | None) -> Tensor | None:
    """Return a copy of a bias, divided over ranks as the bias is.

    A bias that an FSDP2 unit has to gather is returned itself: the unit is found by the parameter.
    """
    if bias is None or find_sharded(bias) is not None:
        return bias
    return marked_as(bias, bias.clone())


def detached(tensor: Tensor) -> Tensor:
    """Return the tensor without its graph, divided over ranks as the tensor is."""
    return marked_as(tensor, tensor.detach())


def takes_vector(weight: Tensor, bias: Tensor | None) -> bool:
    """Return True if a vector of all classes can be added to the bias of a head."""
    return not is_dtensor(bias) and (not is_dtensor(weight) or find_sharded(weight) is not None)


def whole(tensor: Any, input: Tensor) -> Any:
    """Return a weight or bias with the classes of all ranks; all ranks have to call this.

    None and undivided tensors are returned as they are. A parameter of a head of
    `lowtide.shard_head` is cast to the dtype of the hidden states, as FSDP2's policy does.

    Raises:
        ArgumentError: for a parameter that trains and that an FSDP2 unit has sharded, because
            nothing would reduce its gradient.
    """
    if not is_dtensor(tensor):
        return tensor
    if is_data_sharded(tensor):
        return gathered(tensor).to(input.dtype)
    if torch.is_grad_enabled() and tensor.requires_grad and find_sharded(tensor) is not None:
        raise ArgumentError(
            "these logits need the whole head, which FSDP2 has sharded here, outside of the forward of its "
            "unit: compute them in the forward of that unit, or keep it gathered until backward, by "
            "fully_shard(..., reshard_after_forward=False)"
        )
    return tensor.full_tensor()  # every rank has the same hidden states, and so the same gradient
